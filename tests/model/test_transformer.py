"""The whole model against a second one, written in NumPy loops from the paper's formulas."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.config import Config, ConfigError, ModelConfig, check
from transformer_jax.model import Model
from transformer_jax.model.layers import in_blocks, out_of_blocks, place_in_blocks
from transformer_jax.model.positions import sinusoids
from transformer_jax.sharding import RULES

PAPER = ModelConfig(
    vocab_size=23, d_model=16, d_ff=24, num_heads=2, encoder_layers=2, decoder_layers=2
)
SHALLOW = dataclasses.replace(PAPER, encoder_layers=1, decoder_layers=1)
# Each option away from the paper, all at once; query, key and value widths of their own.
MODERN = dataclasses.replace(
    SHALLOW,
    d_k=5,
    d_v=3,
    norm_position="pre",
    norm="rmsnorm",
    activation="swiglu",
    attention_bias=True,
    ff_bias=False,
    tied_embeddings="none",
    embedding_scale=False,
)
DECODER_ONLY = dataclasses.replace(PAPER, encoder_layers=0, norm_position="pre")
CONFIGS = {"paper": PAPER, "modern": MODERN, "decoder_only": DECODER_ONLY}
# |a - b| <= 1e-5 + 1e-5 * |b|: what "the same" means in float32 at test sizes.
SAME = {"rtol": 1e-5, "atol": 1e-5}
B, S, T = 4, 8, 8
# For programs whose compilation costs far more than their runs.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def random_params(config: ModelConfig, seed: int = 0):
    """No zeros and no ones, so that no bias, scale or table can be left out unseen."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        spread = 0.1 if leaf.ndim == 1 else leaf.shape[0] ** -0.5
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return (centre + spread * rng.normal(size=leaf.shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(draw, Model(config).abstract_params())


@functools.cache
def forward(config: ModelConfig):
    """Compiled logits. Always all arguments, so that most tests share one program."""
    return jax.jit(Model(config).apply)


def logits(params, src_ids, tgt_ids, src_segments, tgt_segments, positions=None, config=PAPER):
    """[B, T, V] as a NumPy array; positions: (source, target). Decoder-only: no source."""
    if positions is None:
        positions = [
            np.broadcast_to(np.arange(x.shape[1], dtype=np.int32), x.shape)
            for x in (src_ids, tgt_ids)
        ]
    arguments = [src_ids, tgt_ids, src_segments, tgt_segments, *positions]
    if not config.encoder_layers:
        arguments[0::2] = [None] * 3
    return np.asarray(forward(config)(params, *arguments))


def segments(lengths, width: int) -> np.ndarray:
    return (np.arange(width) < np.asarray(lengths)[:, None]).astype(np.int32)


@pytest.fixture(scope="module")
def params():
    return random_params(PAPER)


@pytest.fixture(scope="module")
def example():
    """A ragged batch: ids of both sides and segments of both sides."""
    rng = np.random.default_rng(1)
    src_ids, tgt_ids = rng.integers(4, 23, (2, B, S)).astype(np.int32)
    return src_ids, tgt_ids, segments([8, 5, 1, 7], S), segments([3, 8, 6, 1], T)


@pytest.fixture(scope="module")
def expected(params, example):
    return logits(params, *example)


# --- The second implementation: one vector at a time, float64. ---


class PlainTransformer:
    """Sections 3.1 to 3.5 for one sentence pair without padding."""

    def __init__(self, config: ModelConfig, params) -> None:
        self.config = config
        self.params = jax.tree.map(lambda x: np.asarray(x, np.float64), params)

    def logits(self, source, target):
        """Lists of ids -> [T, V]."""
        c, p = self.config, self.params
        memory = None
        if c.encoder_layers:
            xs = self.embed(p["embedding" if c.tied_embeddings == "all" else "source_embedding"])
            xs = [xs(pos, i) for pos, i in enumerate(source)]
            for n in range(c.encoder_layers):
                layer = p[f"encoder_{n}"]
                see_all = lambda layer: lambda ys, i: self.multi_head(layer, ys[i], ys)
                xs = self.sublayer(layer, "self_attention", xs, see_all)
                xs = self.sublayer(layer, "feed_forward", xs, self.feed_forward)
            memory = self.final_norm("encoder_norm", xs)
        embed = self.embed(p["embedding"])
        xs = [embed(pos, i) for pos, i in enumerate(target)]
        for n in range(c.decoder_layers):
            layer = p[f"decoder_{n}"]
            see_past = lambda layer: lambda ys, i: self.multi_head(layer, ys[i], ys[: i + 1])
            xs = self.sublayer(layer, "self_attention", xs, see_past)
            if memory is not None:
                see_source = lambda layer: lambda ys, i: self.multi_head(layer, ys[i], memory)
                xs = self.sublayer(layer, "cross_attention", xs, see_source)
            xs = self.sublayer(layer, "feed_forward", xs, self.feed_forward)
        table = p["output_embedding" if c.tied_embeddings == "none" else "embedding"]
        return np.stack([table @ x for x in self.final_norm("decoder_norm", xs)])

    def embed(self, table):
        c = self.config

        def one(pos, i):
            x = table[i] * (math.sqrt(c.d_model) if c.embedding_scale else 1.0)
            position = [
                (math.cos if dim % 2 else math.sin)(pos / 10000 ** (2 * (dim // 2) / c.d_model))
                for dim in range(c.d_model)
            ]
            return x + np.asarray(position)

        return one

    def sublayer(self, layer, name, xs, make):
        function, norm = make(layer[name]), layer[f"{name}_norm"]
        if self.config.norm_position == "post":
            return [self.norm(norm, x + function(xs, i)) for i, x in enumerate(xs)]
        ys = [self.norm(norm, x) for x in xs]
        return [x + function(ys, i) for i, x in enumerate(xs)]

    def final_norm(self, name, xs):
        if self.config.norm_position == "post":
            return xs
        return [self.norm(self.params[name], x) for x in xs]

    def norm(self, p, x):
        if self.config.norm == "rmsnorm":
            return x / math.sqrt(sum(x * x) / len(x) + self.config.norm_epsilon) * p["scale"]
        mean = sum(x) / len(x)
        variance = sum((x - mean) ** 2) / len(x)
        return (x - mean) / math.sqrt(variance + self.config.norm_epsilon) * p["scale"] + p["bias"]

    def multi_head(self, p, x, memory):
        result = 0.0
        for head in range(self.config.num_heads):
            # [D] times [D, K]; a bias, where there is one, belongs to the head.
            project = lambda name, y, head=head: (
                y @ p[name][:, head] + p.get(f"{name}_bias", np.zeros((99, 1)))[head]
            )
            query = project("query", x)
            scores = [query @ project("key", y) / math.sqrt(len(query)) for y in memory]
            total = sum(math.exp(score) for score in scores)
            values = [project("value", y) for y in memory]
            context = sum(math.exp(s) / total * v for s, v in zip(scores, values, strict=True))
            result = result + context @ p["out"][head]
        return result + p.get("out_bias", 0.0)

    def feed_forward(self, p):
        def one(ys, i):
            hidden = ys[i] @ p["inner"] + p.get("inner_bias", 0.0)
            if self.config.activation == "swiglu":
                gate = ys[i] @ p["gate"]
                hidden = hidden * gate / (1 + np.exp(-gate))
            else:
                hidden = np.maximum(hidden, 0.0)
            return hidden @ p["outer"] + p.get("outer_bias", 0.0)

        return one


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_the_loops(name, example):
    """Bugs: anything that is not the paper: order of norm and residual, a missing scale or bias,
    halves instead of interleaved sines, untied tables, wrong mask, axis or head order."""
    config = CONFIGS[name]
    params = random_params(config)
    src_ids, tgt_ids, src_segments, tgt_segments = example
    got = logits(params, *example, config=config)
    assert got.dtype == np.float32
    plain = PlainTransformer(config, params)
    for row in range(B):
        source, target = src_segments[row].sum(), tgt_segments[row].sum()
        want = plain.logits(src_ids[row, :source], tgt_ids[row, :target])
        np.testing.assert_allclose(got[row, :target], want, **SAME)


def test_absent_segments_and_positions_mean_all_real_and_in_order(params, example):
    """Bug: the short call of the contract gives other logits than the long one."""
    src_ids, tgt_ids, *_ = example
    ones = np.ones((B, S), np.int32)
    short = forward(PAPER)(params, src_ids, tgt_ids)
    np.testing.assert_allclose(short, logits(params, src_ids, tgt_ids, ones, ones), **SAME)


def test_sinusoids_at_positions_0_and_1():
    """Bug (F43): halves instead of pairs, or other frequencies; a single position fails."""
    want = [[0.0, 1.0, 0.0, 1.0], [0.84147098, 0.54030231, 0.00999983, 0.99995000]]
    np.testing.assert_allclose(sinusoids(np.arange(2), 4), want, atol=1e-7)
    assert sinusoids(np.arange(1), 6).tolist() == [[0.0, 1.0, 0.0, 1.0, 0.0, 1.0]]
    # Late positions in float32 arithmetic would be off by 1e-3; here to the last bit or so.
    assert abs(sinusoids(np.asarray(5000), 4)[0] - math.sin(5000)) < 1e-7


def test_an_odd_width_is_refused_before_anything_is_built():
    """Bug (F43): sine and cosine tables of unequal widths fail deep inside."""
    with pytest.raises(ConfigError, match=r"model\.d-model: got 5, allowed: an even number"):
        check(Config(model=ModelConfig(d_model=5, num_heads=1)))


def parameter_count(c: ModelConfig) -> int:
    """Closed form: tied table, no attention biases, feed-forward biases, post-norm LayerNorm."""
    D, F, H = c.d_model, c.d_ff, c.num_heads
    K, U = c.d_k or D // H, c.d_v or D // H
    attention = H * (D * K + D * K + D * U + U * D)  # query, key, value, out
    feed_forward = D * F + F + F * D + D
    norm = 2 * D
    encoder = attention + feed_forward + 2 * norm
    decoder = 2 * attention + feed_forward + 3 * norm
    return c.vocab_size * D + c.encoder_layers * encoder + c.decoder_layers * decoder


@pytest.mark.parametrize(
    ("config", "millions"),
    [
        (ModelConfig(vocab_size=37000, d_model=512, d_ff=2048, num_heads=8), "63.05"),
        (ModelConfig(vocab_size=37000, d_model=1024, d_ff=4096, num_heads=16), "214.2"),
        (ModelConfig(vocab_size=37000, d_k=16), None),  # Table 3 (B)
        (ModelConfig(vocab_size=37000, num_heads=32), None),  # Table 3 (A)
        (PAPER, None),
    ],
)
def test_parameter_count_is_the_closed_form(config, millions):
    """Bug: an extra bias, a missing norm, a second table; base and big are not the paper's."""
    sizes = [math.prod(leaf.shape) for leaf in jax.tree.leaves(Model(config).abstract_params())]
    assert sum(sizes) == parameter_count(config)
    if millions:
        assert f"{sum(sizes) / 1e6:.{len(millions.partition('.')[2])}f}" == millions


def test_parameters_are_float32_whatever_the_activations():
    """Bug: bfloat16 parameters, which stop learning when updates get small."""
    config = dataclasses.replace(PAPER, dtype="bfloat16")
    leaves = jax.tree.leaves(Model(config).abstract_params())
    assert {leaf.dtype.name for leaf in leaves} == {"float32"}


VARIANTS = [
    *CONFIGS.values(),
    dataclasses.replace(PAPER, tied_embeddings="decoder", attention_bias=True, num_kv_heads=1),
    dataclasses.replace(PAPER, activation="geglu", norm_position="pre", logits_bias=True),
    dataclasses.replace(PAPER, positions="learned", max_positions=9, d_k=6, d_v=5),
    dataclasses.replace(PAPER, positions="relative", relative_buckets=4),
]


def sizes_of_axes(config) -> dict[str, set[int]]:
    """Every size that each axis name stands for among the parameters of a model."""
    model = Model(config)
    is_names = lambda x: isinstance(x, jax.sharding.PartitionSpec)
    names = jax.tree.leaves_with_path(model.logical_axes(), is_leaf=is_names)
    shapes = jax.tree.leaves_with_path(model.abstract_params())
    assert len(names) == len(shapes) > 0
    sizes: dict[str, set[int]] = {}
    for (path, axes), (other, leaf) in zip(names, shapes, strict=True):
        where = jax.tree_util.keystr(path)
        assert path == other
        assert len(axes) == leaf.ndim, where
        assert len(set(axes)) == leaf.ndim, where  # one mesh axis cannot cut two dimensions
        for axis, size in zip(axes, leaf.shape, strict=True):
            sizes.setdefault(axis, set()).add(size)
    return sizes


@pytest.mark.parametrize("config", VARIANTS)
def test_every_parameter_names_each_of_its_axes(config):
    """Bugs: a rank without its name, two axes exchanged (their sizes then clash), or a name
    that sharding has no rule for."""
    c = config
    want = {
        "vocab": c.vocab_size,
        "embed": c.d_model,
        "mlp": c.d_ff,
        "heads": c.num_heads,
        "kv_heads": c.num_kv_heads or c.num_heads,
        "d_k": c.d_k or c.d_model // c.num_heads,
        "d_v": c.d_v or c.d_model // c.num_heads,
        "positions": c.max_positions,
        "buckets": c.relative_buckets,
    }
    sizes = sizes_of_axes(config)
    assert sizes == {axis: {want[axis]} for axis in sizes}
    assert sizes.keys() <= RULES.keys()


def test_no_rule_is_unused():
    """Bug: a rule for a name that no parameter has, so that it silently does nothing."""
    assert set().union(*(sizes_of_axes(config) for config in VARIANTS)) == set(RULES)


# --- Who may see what. ---


@pytest.mark.parametrize("j", [0, 3, 7])
def test_a_target_token_changes_nothing_before_it(params, example, j):
    """Bug (F57): the model sees the token it has to predict. Equal to the last bit."""
    src_ids, tgt_ids, src_segments, _ = example
    ones = np.ones((B, T), np.int32)
    other = tgt_ids.copy()
    other[:, j] = 4 + (other[:, j] - 3) % 19
    assert (other[:, j] != tgt_ids[:, j]).all()
    before = logits(params, src_ids, tgt_ids, src_segments, ones)
    after = logits(params, src_ids, other, src_segments, ones)
    np.testing.assert_array_equal(after[:, :j], before[:, :j])
    assert (np.abs(after[:, j:] - before[:, j:]).max(-1) > 1e-3).all()


def test_pad_ids_may_hold_anything(params, example, expected):
    """Bug (F41): padding is attended to. Equal to the last bit."""
    src_ids, tgt_ids, src_segments, tgt_segments = example
    rng = np.random.default_rng(5)
    other_src = np.where(src_segments > 0, src_ids, rng.integers(0, 23, src_ids.shape))
    other_tgt = np.where(tgt_segments > 0, tgt_ids, rng.integers(0, 23, tgt_ids.shape))
    got = logits(
        params, other_src.astype(np.int32), other_tgt.astype(np.int32), src_segments, tgt_segments
    )
    real = tgt_segments > 0
    np.testing.assert_array_equal(got[real], expected[real])


def test_the_last_real_source_token_is_seen_by_every_target_position(params, example, expected):
    """Bug (F58): cross-attention masked by the target's padding hides the end of the source."""
    src_ids, tgt_ids, src_segments, tgt_segments = example
    other, last = src_ids.copy(), src_segments.sum(1) - 1
    rows = np.arange(B)
    other[rows, last] = 4 + (other[rows, last] - 3) % 19
    got = logits(params, other, tgt_ids, src_segments, tgt_segments)
    real = tgt_segments > 0
    assert (np.abs(got - expected).max(-1)[real] > 1e-3).all()


def test_padding_and_company_change_nothing(params, example, expected):
    """Bug (F41): logits depend on the padded length, on left-over positions, or on neighbours."""
    src_ids, tgt_ids, src_segments, tgt_segments = example
    row = 1
    source, target = src_segments[row].sum(), tgt_segments[row].sum()
    want = expected[row, :target]  # beside three neighbours, one of them longer
    alone = forward(PAPER)(params, src_ids[[row], :source], tgt_ids[[row], :target])
    np.testing.assert_allclose(alone[0], want, **SAME)
    for width in (16, 32):
        pad = lambda x, n, width=width: np.pad(x[[row], :n], ((0, 0), (0, width - n)))
        arguments = [pad(src_ids, source), pad(tgt_ids, target)]
        arguments += [segments([source], width), segments([target], width)]
        got = logits(params, *arguments)
        np.testing.assert_allclose(got[0, :target], want, **SAME)


def test_packed_sentences_equal_separate_ones(params, example):
    """Bug: packed sentences see each other, or go on counting positions."""
    src_ids, tgt_ids, *_ = example
    source, target = (3, 2, 2), (2, 4, 1)  # three pairs in the first row; one slot padding
    ones = np.ones((B, S), np.int32)

    def packed(lengths):
        numbers = [i + 1 for i, n in enumerate(lengths) for _ in range(n)]
        places = [i for n in lengths for i in range(n)]
        numbers, places = (np.pad(x, (0, S - len(x))) for x in (numbers, places))
        row = lambda x, rest: np.concatenate([[x], rest[1:]]).astype(np.int32)
        return row(numbers, ones), row(places, np.tile(np.arange(S), (B, 1)))

    (src_seg, src_pos), (tgt_seg, tgt_pos) = packed(source), packed(target)
    got = logits(params, src_ids, tgt_ids, src_seg, tgt_seg, (src_pos, tgt_pos))
    # Each pair in a row of its own: the same ids, moved to the front.
    starts = [np.cumsum((0, *lengths[:-1])) for lengths in (source, target)]
    own = [np.zeros((B, S), np.int32) for _ in range(2)]
    for side, (ids, lengths) in enumerate(((src_ids, source), (tgt_ids, target))):
        for i, (start, n) in enumerate(zip(starts[side], lengths, strict=True)):
            own[side][i, :n] = ids[0, start : start + n]
    want = logits(params, *own, segments((*source, 1), S), segments((*target, 1), T))
    for i, (start, n) in enumerate(zip(starts[1], target, strict=True)):
        np.testing.assert_allclose(got[0, start : start + n], want[i, :n], **SAME)


# --- Finite, and of the right size. ---


@functools.cache
def loss_and_gradient(config: ModelConfig):
    """Sum over real target positions of squared logits: (value, logits), gradients."""

    def loss(params, src_ids, tgt_ids, src_segments, tgt_segments):
        found = Model(config).apply(params, src_ids, tgt_ids, src_segments, tgt_segments)
        return jnp.sum(jnp.square(found).mean(-1) * (tgt_segments > 0)), found

    return jax.jit(jax.value_and_grad(loss, has_aux=True), compiler_options=QUICK)


def assert_finite(tree) -> None:
    for path, leaf in jax.tree.leaves_with_path(tree):
        assert np.isfinite(np.asarray(leaf, np.float32)).all(), jax.tree_util.keystr(path)


def with_empty_rows(example):
    src_ids, tgt_ids, src_segments, tgt_segments = (x.copy() for x in example)
    src_segments[3] = 0  # a target without a source
    src_segments[2] = tgt_segments[2] = 0  # a filler row
    return src_ids, tgt_ids, src_segments, tgt_segments


def test_a_row_without_source_or_target_hurts_nobody(example):
    """Bug (F38): an all-padding row makes NaN, in its own logits or in everyone's gradient."""
    function, params = loss_and_gradient(SHALLOW), random_params(SHALLOW)
    (_, want), _ = function(params, *example)
    (value, found), gradients = function(params, *with_empty_rows(example))
    assert_finite((value, found, gradients))
    np.testing.assert_allclose(found[:2], want[:2], **SAME)


def test_huge_attention_scores_stay_finite(example):
    """Bug (F37): scores of 1e4 and more overflow in the softmax or its gradient."""

    def enlarge(path, leaf):
        return leaf * 1e4 if path[-1].key == "query" else leaf

    huge = jax.tree_util.tree_map_with_path(enlarge, random_params(SHALLOW))
    assert_finite(loss_and_gradient(SHALLOW)(huge, *example))


def test_bfloat16_is_finite_and_near_float32(example):
    """Bug (F37, F39): in low precision a mask overflows, or two added masks do."""
    arguments, params = with_empty_rows(example), random_params(SHALLOW)
    (_, want), _ = loss_and_gradient(SHALLOW)(params, *arguments)
    low = dataclasses.replace(SHALLOW, dtype="bfloat16")
    (value, found), gradients = loss_and_gradient(low)(params, *arguments)
    assert found.dtype == jnp.float32
    assert_finite((value, found, gradients))
    # A rounding errs by up to 2**-9 of its input; about ten of them follow one another.
    error, real = np.abs(found - want), arguments[3] > 0
    assert error[real].max() < 10 * 2**-9 * np.abs(want).max()


def test_logits_at_the_start_are_of_order_one():
    """Bug (F53): sqrt(d_model) on the wrong side of the tied table, twice, or not at all."""
    config = ModelConfig(
        vocab_size=1000, d_model=64, d_ff=128, num_heads=4, encoder_layers=1, decoder_layers=1
    )
    model = Model(config)
    params = jax.jit(model.init, compiler_options=QUICK)(jax.random.key(0))
    rng = np.random.default_rng(0)
    src_ids, tgt_ids, out_ids = rng.integers(4, 1000, (3, 8, 16)).astype(np.int32)
    found = np.asarray(forward(config)(params, src_ids, tgt_ids), np.float64)
    assert 0.5 < found.std() < 2.0
    # Embedding plus position: of order one as well, or one of the two drowns the other.
    scaled = np.asarray(params["embedding"]).std() * math.sqrt(config.d_model)
    assert 0.9 < scaled < 1.1
    probability = np.exp(found) / np.exp(found).sum(-1, keepdims=True)
    nll = -np.log(np.take_along_axis(probability, out_ids[:, :, None], 2)).mean()
    assert abs(nll - math.log(1000)) < 1.0


# --- The cache. ---


@functools.cache
def new_cache(config: ModelConfig):
    """(params, src_ids, src_mask) -> a cache for three hypotheses of T tokens."""
    model = Model(config)

    def start(params, src_ids, src_mask):
        if not config.encoder_layers:
            return model.init_cache(params, None, None, T, 3, B)
        return model.init_cache(params, model.encode(params, src_ids, src_mask), src_mask, T, 3)

    return jax.jit(start, compiler_options=QUICK)


@functools.cache
def prefill(config: ModelConfig):
    return jax.jit(Model(config).prefill, compiler_options=QUICK)


@functools.cache
def cached_step(config: ModelConfig):
    return jax.jit(Model(config).decode_step, compiler_options=QUICK)


@pytest.mark.parametrize(
    ("name", "prefix"),
    [("paper", 0), ("paper", 1), ("paper", 4), ("modern", 2), ("decoder_only", 3)],
)
def test_cached_steps_equal_the_full_forward_pass(name, prefix, example):
    """Bugs (F70, F79, F55): the cache is not reordered with its hypotheses, is off by one in
    place or position, lets a hypothesis see the token of another, or loses the prefix."""
    config, W = CONFIGS[name], 3
    params, step = random_params(config), cached_step(config)
    src_ids, _, src_segments, _ = example
    rng = np.random.default_rng(prefix)
    cache = new_cache(config)(params, src_ids, src_segments > 0)
    assert out_of_blocks(cache.past[0].key).shape[-1] == cache.past[0].value.shape[2] == W * T
    found, parents = [], np.zeros((B, W), np.int32)
    history = rng.integers(4, 23, (B, 1, prefix)).repeat(W, 1)  # ids of each hypothesis
    if prefix:
        first, cache = prefill(config)(params, history[:, 0].astype(np.int32), cache)
        found.append((history, np.asarray(first)[:, None].repeat(W, 1)))
    for _ in range(prefix, T):
        token = rng.integers(4, 23, (B, W)).astype(np.int32)
        history = np.take_along_axis(history, parents[:, :, None], 1)
        history = np.concatenate([history, token[:, :, None]], 2)
        got, cache = step(params, token, parents, cache)
        assert got.dtype == jnp.float32
        found.append((history, np.asarray(got)[:, :, None]))
        parents = rng.integers(0, W, (B, W)).astype(np.int32)
    for history, got in found:
        length = history.shape[2]
        ids = np.pad(history, ((0, 0), (0, 0), (0, T - length))).astype(np.int32)
        for w in range(W):
            ones = np.ones((B, T), np.int32)
            want = logits(params, src_ids, ids[:, w], src_segments, ones, config=config)
            want = want[:, length - got.shape[2] : length]
            np.testing.assert_allclose(got[:, w], want, **SAME)


@pytest.mark.parametrize(
    ("slots", "times", "first", "new", "blocks"),
    [
        (4, 16, 5, 1, 2),  # a step of four hypotheses amid the second block of 32
        (4, 16, 8, 1, 2),
        (3, 32, 17, 1, 2),  # blocks of 48
        (1, 64, 33, 1, 2),
        (4, 16, 0, 11, 2),  # a prompt of more than one block
        (1, 64, 0, 64, 2),
        (4, 9, 8, 1, 1),  # 36 places are no blocks
    ],
)
def test_keys_find_their_places_in_blocks(slots, times, first, new, blocks):
    """Bug: a write beyond its block is moved back by JAX, over the keys of an earlier token."""
    rng = np.random.default_rng(0)
    past, key = (rng.normal(size=(2, 3, 5, n * slots)).astype(np.float32) for n in (times, new))
    cache = in_blocks(past, slots)
    assert cache.shape[2] == blocks
    place = jax.jit(place_in_blocks, compiler_options=QUICK)
    got = np.asarray(out_of_blocks(place(cache, key, np.int32(first * slots))))
    past[..., first * slots : (first + new) * slots] = key
    end = (first + new) * slots
    np.testing.assert_array_equal(got[..., :end], past[..., :end])
    if new == 1:  # a prompt goes into an empty cache
        np.testing.assert_array_equal(got, past)


@pytest.mark.parametrize("grows", [False, True])
def test_a_cache_of_several_blocks(grows):
    """Bugs: a prompt longer than a block, or growth from one block to several, loses keys."""
    config, W, prompt, steps = DECODER_ONLY, 4, 13, 3
    params, rng = random_params(config), np.random.default_rng(2)
    length = prompt + steps
    ids = rng.integers(4, 23, (B, length)).astype(np.int32)
    model = Model(config)
    cache = model.init_cache(params, None, None, prompt if grows else 16, W, B)
    assert cache.past[0].key.shape[2] == (1 if grows else 2)
    found, cache = prefill(config)(params, ids[:, :prompt], cache)
    if grows:
        cache = cache.grown(16 - prompt)
    assert cache.past[0].key.shape[2] == 2
    ones = np.ones((B, length), np.int32)
    want = logits(params, ids, ids, ones, ones, config=config)
    np.testing.assert_allclose(found, want[:, :prompt], **SAME)
    for i in range(steps):
        token = ids[:, prompt + i, None].repeat(W, 1)
        got, cache = cached_step(config)(params, token, np.zeros((B, W), np.int32), cache)
        for w in range(W):
            np.testing.assert_allclose(got[:, w], want[:, prompt + i], **SAME)


def test_prompts_of_different_lengths_share_a_prefill():
    """Bug: padding of the shorter prompt is attended to, or counted as a position."""
    config, lengths = DECODER_ONLY, np.asarray([4, 2, 1, 3])
    params, rng = random_params(config), np.random.default_rng(9)
    ids = rng.integers(4, 23, (B, T)).astype(np.int32)
    W, prompt = 3, 4
    real = np.arange(prompt) < lengths[:, None]
    cache = new_cache(config)(params, None, None)
    first, cache = prefill(config)(
        params, np.where(real, ids[:, :prompt], 0).astype(np.int32), cache, real
    )
    ones = np.ones((B, T), np.int32)
    want = logits(params, ids, ids, ones, ones, config=config)
    np.testing.assert_allclose(np.asarray(first)[real], want[:, :prompt][real], **SAME)
    for i in range(3):
        token = np.take_along_axis(ids, (lengths + i)[:, None], 1).repeat(W, 1)
        got, cache = cached_step(config)(params, token, np.zeros((B, W), np.int32), cache)
        for row in range(B):
            np.testing.assert_allclose(got[row, 0], want[row, lengths[row] + i], **SAME)


def test_a_step_without_parents_continues_each_slot(params, example):
    """Bug: parent=None is taken for slot 0."""
    src_ids, tgt_ids, src_segments, _ = example
    cache = new_cache(PAPER)(params, src_ids, src_segments > 0)
    tokens = np.stack([tgt_ids, tgt_ids[:, ::-1], tgt_ids[::-1]], 1)  # [B, W, T]
    own = np.tile(np.arange(3, dtype=np.int32), (B, 1))
    with_none = with_own = cache
    for t in range(3):
        token = tokens[:, :, t]
        a, with_none = cached_step(PAPER)(params, token, None, with_none)
        b, with_own = cached_step(PAPER)(params, token, own, with_own)
        np.testing.assert_allclose(a, b, **SAME)
    assert np.abs(a[:, 0] - a[:, 1]).max() > 1e-2
