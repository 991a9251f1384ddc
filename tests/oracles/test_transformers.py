"""Same weights, same numbers as Hugging Face's Marian and T5."""

import jax
import numpy as np
import pytest

from transformer_jax.config import ModelConfig
from transformer_jax.model import Model
from transformer_jax.model.attention import attention
from transformer_jax.model.masks import Mask
from transformer_jax.model.positions import RelativeBias, relative_buckets, sinusoids

torch = pytest.importorskip("torch", reason="make test-oracles installs it")
transformers = pytest.importorskip("transformers", reason="make test-oracles installs it")
pytestmark = [
    pytest.mark.oracle,
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]
SAME = {"rtol": 1e-4, "atol": 1e-4}
V, D, F, H = 41, 32, 56, 4


def marian(activation: str):
    config = transformers.MarianConfig(
        vocab_size=V,
        d_model=D,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=H,
        decoder_attention_heads=H,
        encoder_ffn_dim=F,
        decoder_ffn_dim=F,
        activation_function=activation,
        scale_embedding=True,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=1,
        decoder_start_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.MarianMTModel(config).eval()
    for name, parameter in model.named_parameters():
        if "embed_positions" not in name:
            torch.nn.init.normal_(parameter, std=0.15)
    model.final_logits_bias.normal_()
    return model


def our_params(state: dict) -> dict:
    def heads(name: str, side: str) -> dict:
        weight, bias = state[f"{name}.weight"], state[f"{name}.bias"]
        if side == "out":
            return {"out": weight.T.reshape(H, D // H, D), "out_bias": bias}
        return {side: weight.T.reshape(D, H, D // H), f"{side}_bias": bias.reshape(H, D // H)}

    def norm(name: str) -> dict:
        return {"scale": state[f"{name}.weight"], "bias": state[f"{name}.bias"]}

    params = {
        "embedding": state["model.shared.weight"],
        "output_bias": state["final_logits_bias"][0],
    }
    for stack, depth in (("encoder", 2), ("decoder", 3)):
        for i in range(depth):
            here = f"model.{stack}.layers.{i}"
            kinds = {"self_attention": "self_attn"}
            if stack == "decoder":
                kinds["cross_attention"] = "encoder_attn"
            layer: dict = {}
            for ours, theirs in kinds.items():
                layer[ours] = {}
                for side in ("query", "key", "value", "out"):
                    projection = "out_proj" if side == "out" else f"{side[0]}_proj"
                    layer[ours] |= heads(f"{here}.{theirs}.{projection}", side)
                layer[f"{ours}_norm"] = norm(f"{here}.{theirs}_layer_norm")
            layer["feed_forward"] = {
                "inner": state[f"{here}.fc1.weight"].T,
                "inner_bias": state[f"{here}.fc1.bias"],
                "outer": state[f"{here}.fc2.weight"].T,
                "outer_bias": state[f"{here}.fc2.bias"],
            }
            layer["feed_forward_norm"] = norm(f"{here}.final_layer_norm")
            params[f"{stack}_{i}"] = layer
    return params


@pytest.mark.parametrize("activation", ["relu", "silu"])
def test_logits_equal_marian(activation):
    """Bug: order or exponent of the sinusoids, the biases, the epsilon, or the logits bias."""
    model = marian("swish" if activation == "silu" else activation)
    config = ModelConfig(
        vocab_size=V,
        d_model=D,
        d_ff=F,
        num_heads=H,
        encoder_layers=2,
        decoder_layers=3,
        activation=activation,
        attention_bias=True,
        logits_bias=True,
        norm_epsilon=1e-5,
        sinusoid_order="concatenated",
    )
    rng = np.random.default_rng(0)
    src, tgt = rng.integers(2, V, (3, 9)), rng.integers(2, V, (3, 5))
    real = np.arange(9) < np.asarray([9, 4, 2])[:, None]
    with torch.no_grad():
        want = model(
            input_ids=torch.from_numpy(src),
            attention_mask=torch.from_numpy(real.astype(int)),
            decoder_input_ids=torch.from_numpy(tgt),
        ).logits.numpy()
    params = our_params({k: v.numpy() for k, v in model.state_dict().items()})
    got = jax.jit(Model(config).apply)(params, src, tgt, real.astype(int))
    np.testing.assert_allclose(got, want, **SAME)


def test_sinusoids_equal_marian_and_m2m100():
    """Marian: concatenated with 2i/d. M2M100 and NLLB: concatenated with i/(d/2-1)."""
    from transformers.models.m2m_100.modeling_m2m_100 import M2M100SinusoidalPositionalEmbedding
    from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

    marian_table = MarianSinusoidalPositionalEmbedding(50, D).create_weight().detach().numpy()
    want = sinusoids(np.arange(50), D, "concatenated", "2i/d")
    np.testing.assert_allclose(marian_table, want, atol=1e-6)
    m2m = M2M100SinusoidalPositionalEmbedding.get_embedding(50, D).numpy()
    want = sinusoids(np.arange(50), D, "concatenated", "i/(d/2-1)")
    np.testing.assert_allclose(m2m, want, atol=1e-5)


@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_buckets_equal_t5(bidirectional):
    """Bug: a boundary between two buckets off by one."""
    from transformers.models.t5.modeling_t5 import T5Attention

    distance = np.arange(-600, 600)
    want = T5Attention._relative_position_bucket(
        torch.from_numpy(distance), bidirectional, num_buckets=32, max_distance=128
    )
    got = relative_buckets(np.asarray(distance, np.int32), bidirectional, 32, 128)
    np.testing.assert_array_equal(got, want.numpy())


@pytest.mark.parametrize("decoder", [True, False])
def test_attention_with_a_relative_bias_equals_t5(decoder):
    """T5 leaves the division by sqrt(d_k) to its initial weights, so our queries take it back."""
    from transformers.models.t5.modeling_t5 import T5Attention

    config = transformers.T5Config(
        d_model=D, d_kv=8, num_heads=H, is_decoder=decoder, relative_attention_num_buckets=8
    )
    torch.manual_seed(1)
    theirs = T5Attention(config, has_relative_attention_bias=True, layer_idx=0).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    x = np.random.default_rng(0).normal(size=(2, 11, D)).astype(np.float32)
    causal = np.where(np.tri(11, dtype=bool), 0.0, -1e9) if decoder else np.zeros((11, 11))
    with torch.no_grad():
        want = theirs(
            torch.from_numpy(x), mask=torch.from_numpy(causal[None, None].astype(np.float32))
        )[0].numpy()
    state = {k: v.numpy() for k, v in theirs.state_dict().items()}
    heads = lambda name: (x @ state[f"{name}.weight"].T).reshape(2, 11, H, 8).swapaxes(1, 2)
    bias = RelativeBias(state["relative_attention_bias.weight"], not decoder, 128)
    context = attention(heads("q") * 8**0.5, heads("k"), heads("v"), Mask(causal=decoder), bias)
    got = np.asarray(context).swapaxes(1, 2).reshape(2, 11, D) @ state["o.weight"].T
    np.testing.assert_allclose(got, want, **SAME)
