"""Same weights, same logits as torch.nn.Transformer, with padding and causal masks."""

import math

import jax
import numpy as np
import pytest

from transformer_jax.config import ModelConfig
from transformer_jax.model import Model

torch = pytest.importorskip("torch", reason="make test-oracles installs it")
pytestmark = pytest.mark.oracle

V, D, F, H, LAYERS = 37, 32, 48, 4, 2
SAME = {"rtol": 1e-4, "atol": 1e-4}


def torch_model(norm_position: str, activation: str):
    """Encoder and decoder of torch; a final norm only where the norms come first."""
    torch.manual_seed(0)
    first = norm_position == "pre"
    options = {"batch_first": True, "norm_first": first, "activation": activation, "dropout": 0.0}
    options["layer_norm_eps"] = 1e-6
    final = lambda: torch.nn.LayerNorm(D, eps=1e-6) if first else None
    encoder = torch.nn.TransformerEncoder(
        torch.nn.TransformerEncoderLayer(D, H, F, **options),
        LAYERS,
        final(),
        enable_nested_tensor=False,
    )
    decoder = torch.nn.TransformerDecoder(
        torch.nn.TransformerDecoderLayer(D, H, F, **options), LAYERS, final()
    )
    model = torch.nn.Transformer(
        D, H, custom_encoder=encoder, custom_decoder=decoder, batch_first=True
    )
    for parameter in model.parameters():  # torch starts biases at 0 and copies layers
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def array(tensor) -> np.ndarray:
    return tensor.detach().numpy()


def attention_params(module) -> dict:
    weights = array(module.in_proj_weight).reshape(3, D, D)
    biases = array(module.in_proj_bias).reshape(3, H, D // H)
    names = ("query", "key", "value")
    params = {n: w.T.reshape(D, H, D // H) for n, w in zip(names, weights, strict=True)}
    params |= {f"{n}_bias": b for n, b in zip(names, biases, strict=True)}
    params["out"] = array(module.out_proj.weight).T.reshape(H, D // H, D)
    return params | {"out_bias": array(module.out_proj.bias)}


def norm_params(module) -> dict:
    return {"scale": array(module.weight), "bias": array(module.bias)}


def layer_params(layer, cross: bool) -> dict:
    names = ("self_attention", "cross_attention", "feed_forward")
    names = names if cross else (names[0], names[2])
    norms = [layer.norm1, layer.norm2, *([layer.norm3] if cross else [])]
    params = {f"{n}_norm": norm_params(m) for n, m in zip(names, norms, strict=True)}
    params["self_attention"] = attention_params(layer.self_attn)
    if cross:
        params["cross_attention"] = attention_params(layer.multihead_attn)
    params["feed_forward"] = {
        "inner": array(layer.linear1.weight).T,
        "inner_bias": array(layer.linear1.bias),
        "outer": array(layer.linear2.weight).T,
        "outer_bias": array(layer.linear2.bias),
    }
    return params


def our_params(model, table: np.ndarray) -> dict:
    params: dict = {"embedding": table}
    for stack, cross in ((model.encoder, False), (model.decoder, True)):
        name = "decoder" if cross else "encoder"
        for i, layer in enumerate(stack.layers):
            params[f"{name}_{i}"] = layer_params(layer, cross)
        if stack.norm is not None:
            params[f"{name}_norm"] = norm_params(stack.norm)
    return params


def embedded(ids: np.ndarray, table: np.ndarray):
    """Section 3.4 and 3.5, by torch and plain loops."""
    x = table[ids] * math.sqrt(D)
    for position in range(ids.shape[1]):
        for i in range(D // 2):
            angle = position / 10000 ** (2 * i / D)
            x[:, position, 2 * i] += math.sin(angle)
            x[:, position, 2 * i + 1] += math.cos(angle)
    return torch.from_numpy(x.astype(np.float32))


@pytest.mark.parametrize("norm_position", ["post", "pre"])
@pytest.mark.parametrize("activation", ["relu", "gelu"])
def test_logits_equal_torch(norm_position, activation):
    """Bug: any difference from a second, widely used implementation of Figure 1."""
    if activation == "gelu":
        activation_of_torch = lambda x: torch.nn.functional.gelu(x, approximate="tanh")
    else:
        activation_of_torch = activation
    model = torch_model(norm_position, activation_of_torch)
    rng = np.random.default_rng(0)
    table = (rng.normal(size=(V, D)) * D**-0.5).astype(np.float32)
    src, tgt = rng.integers(4, V, (3, 7)), rng.integers(4, V, (3, 6))
    src_real = np.arange(7) < np.asarray([7, 4, 1])[:, None]
    tgt_real = np.arange(6) < np.asarray([2, 6, 5])[:, None]
    config = ModelConfig(
        vocab_size=V,
        d_model=D,
        d_ff=F,
        num_heads=H,
        encoder_layers=LAYERS,
        decoder_layers=LAYERS,
        norm_position=norm_position,
        activation=activation,
        attention_bias=True,
    )
    with torch.no_grad():
        hidden = model(
            embedded(src, table),
            embedded(tgt, table),
            tgt_mask=torch.nn.Transformer.generate_square_subsequent_mask(6, dtype=torch.bool),
            src_key_padding_mask=torch.from_numpy(~src_real),
            tgt_key_padding_mask=torch.from_numpy(~tgt_real),
            memory_key_padding_mask=torch.from_numpy(~src_real),
        )
        want = (hidden @ torch.from_numpy(table).T).numpy()
    got = jax.jit(Model(config).apply)(
        our_params(model, table), src, tgt, src_real.astype(int), tgt_real.astype(int)
    )
    np.testing.assert_allclose(np.asarray(got)[tgt_real], want[tgt_real], **SAME)
