"""One update: the same on any number of devices and for any padding, new dropout each step."""

import math
from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh

from transformer_jax.config import (
    Config,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from transformer_jax.data.batching import Bucket, Encoded, collate
from transformer_jax.data.tokenizer import EOS
from transformer_jax.decode.engine import Engine, Request
from transformer_jax.decode.search import BeamSearch
from transformer_jax.model import Model
from transformer_jax.model.dropout import dropout_key
from transformer_jax.sharding import make_mesh, put_batch
from transformer_jax.train.optimizer import make_optimizer
from transformer_jax.train.state import TrainState, abstract_state, new_state
from transformer_jax.train.step import batch_metrics, compile_eval_step, compile_train_step
from transformer_jax.types import Batch, Metrics

pytestmark = pytest.mark.usefixtures("quick_compilation")
VOCABULARY = 20
CONFIG = Config(
    seed=7,
    model=ModelConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        d_ff=32,
        num_heads=2,
        encoder_layers=1,
        decoder_layers=1,
    ),
    # A larger epsilon: Adam's first steps are signs, and the sign of a rounding error is random.
    optimizer=OptimizerConfig(warmup_steps=4, epsilon=1e-3),
    train=TrainConfig(label_smoothing=0.1),
)
MODEL = Model(CONFIG.model)


class Trainer:
    """A compiled step on so many devices."""

    def __init__(self, config: Config, mesh: Mesh) -> None:
        self.mesh, self.optimizer = mesh, make_optimizer(config)
        model = Model(config.model)
        self.abstract = abstract_state(model, self.optimizer, mesh)
        self.step = compile_train_step(model, self.optimizer, config, mesh, self.abstract)

    def state(self, params: dict, step: int = 0) -> TrainState:
        """A fresh state of given parameters (of copies: the step takes its state for good)."""
        params = jax.tree.map(np.array, params)
        state = TrainState(np.int32(step), params, self.optimizer.init(params))
        place = lambda x, wanted: jax.device_put(np.array(x), wanted.sharding)
        return jax.tree.map(place, state, self.abstract)

    def run(self, state: TrainState, batches: list[Batch]) -> tuple[TrainState, list[Metrics]]:
        found = []
        for batch in batches:
            state, metrics = self.step(state, put_batch(self.mesh, batch))
            found.append(jax.device_get(metrics))
        return state, found


def devices(count: int, **axes: int) -> Mesh:
    return make_mesh(MeshConfig(**(axes or {"data": count})), jax.devices()[:count])


def encode(pairs: list[tuple[list[int], list[int]]]) -> Encoded:
    """Pairs of ids without EOS, which is added."""
    sides = []
    for side in (0, 1):
        sentences = [[*pair[side], EOS] for pair in pairs]
        sides += [np.concatenate(sentences).astype(np.int32)]
        sides += [np.cumsum([0, *map(len, sentences)])]
    return Encoded(*sides)


def random_pairs(count: int, seed: int) -> list[tuple[list[int], list[int]]]:
    draw = np.random.default_rng(seed)
    ids = lambda: draw.integers(4, VOCABULARY, draw.integers(1, 7)).tolist()
    return [(ids(), ids()) for _ in range(count)]


def make_batch(count: int = 13, seed: int = 0, rows: int = 16, length: int = 8) -> Batch:
    """Some pairs and filler rows."""
    pairs = random_pairs(count, seed)
    return collate(encode(pairs), Bucket(rows, length, length), np.arange(count))


@pytest.fixture(scope="module")
def one() -> Trainer:
    return Trainer(CONFIG, devices(1))


@pytest.fixture(scope="module")
def params() -> dict:
    return jax.jit(MODEL.init)(jax.random.key(3))


def close(got, expected, tolerance: float = 1e-5) -> None:
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)


# ---- Devices ------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4, 8])
def test_any_number_of_devices_makes_the_same_update(one: Trainer, params: dict, count: int):
    """Bug: a mean of the devices' means, a dropout mask for each device, a share that is lost.

    The rows divide unevenly: the last device holds filler alone.
    """
    batches = [make_batch(seed=seed) for seed in range(3)]
    expected_state, expected = one.run(one.state(params), batches)
    many = Trainer(CONFIG, devices(count))
    state, found = many.run(many.state(params), batches)
    for got, want in zip(found, expected, strict=True):
        close(got, want)
        assert (got.tokens, got.correct, got.updates) == (want.tokens, want.correct, 1)
    close(state.params, expected_state.params)
    close(state.opt_state, expected_state.opt_state)
    assert int(state.step) == 3


MESHES = {
    "replicated": (8, 1, 1),
    "fully sharded": (1, 8, 1),
    "mixed": (2, 2, 2),
    "tensor parallel": (4, 1, 2),
}


@pytest.mark.parametrize("name", MESHES)
def test_any_mesh_makes_the_same_update(one: Trainer, params: dict, name: str):
    """Bug: a gradient is summed over an axis twice or not at all, heads of one share see another's
    dropout, a parameter's parts are put together in the wrong order."""
    batch = make_batch(seed=5)
    expected_state, (expected,) = one.run(one.state(params), [batch])
    data, fsdp, model = MESHES[name]
    many = Trainer(CONFIG, devices(8, data=data, fsdp=fsdp, model=model))
    state, (found,) = many.run(many.state(params), [batch])
    close(found, expected)
    # After one update from zero, Adam's first moment is (1 - b1) times the gradient.
    moments = zip(
        *(jax.tree.leaves(x.opt_state[0].mu) for x in (state, expected_state)), strict=True
    )
    for got, want in jax.device_get(list(moments)):
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    close(state.params, expected_state.params)


def test_fully_sharded_state_takes_an_eighth_of_the_memory(params: dict):
    """Bug: a copy of the state stays whole on a device, and a model that should fit does not."""

    def held(**axes: int) -> int:
        """Bytes on the first device, of a state that the step has put there."""
        trainer = Trainer(wide, devices(8, **axes))
        state = trainer.state(start)
        return sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state))

    wide = replace(CONFIG, model=replace(CONFIG.model, d_model=64, d_ff=128, vocab_size=64))
    start = jax.jit(Model(wide.model).init)(jax.random.key(0))
    assert held(fsdp=8) <= 1.1 / 8 * held(data=8)


# ---- Micro-batches, layers, rematerialisation ---------------------------------------------------


def changed(**train: int) -> Config:
    return replace(CONFIG, train=replace(CONFIG.train, **train))


@pytest.mark.parametrize("count, mesh", [(2, (1, 1, 1)), (16, (1, 1, 1)), (4, (2, 2, 1))])
def test_any_split_into_micro_batches_makes_the_same_update(
    one: Trainer, params: dict, count: int, mesh: tuple[int, int, int]
):
    """Bug: F47: a mean of the parts' means; F50: each part drops the elements of the first; a part
    without a token makes NaN (the last of 16 rows are filler)."""
    batch = make_batch(seed=6)
    expected_state, (expected,) = one.run(one.state(params), [batch])
    data, fsdp, model = mesh
    cut = Trainer(
        changed(micro_batches=count), devices(data * fsdp, data=data, fsdp=fsdp, model=model)
    )
    state, (found,) = cut.run(cut.state(params), [batch])
    close(found, expected)
    close(state.params, expected_state.params, 1e-6)


@pytest.fixture(scope="module")
def deep() -> tuple[Config, dict, TrainState, Metrics]:
    """A model of two layers on each side, and an update of it as the others make it."""
    config = replace(CONFIG, model=replace(CONFIG.model, encoder_layers=2, decoder_layers=2))
    start = jax.jit(Model(config.model).init)(jax.random.key(1))
    plain = Trainer(config, devices(1))
    state, (metrics,) = plain.run(plain.state(start), [make_batch(seed=7)])
    return config, start, state, metrics


@pytest.mark.parametrize("layers, remat", [("scanned", "full"), ("unrolled", "dots")])
def test_scanned_and_recomputed_layers_make_the_same_update(deep, layers: str, remat: str):
    """Bug: a scan gives all layers the dropout or the parameters of one; what is computed again in
    the backward pass is not what was computed; the tree of parameters is another."""
    config, start, expected_state, expected = deep
    config = replace(config, model=replace(config.model, layers=layers, remat=remat))
    other = Trainer(config, devices(2, model=2, data=1))
    state, (found,) = other.run(other.state(start), [make_batch(seed=7)])
    close(found, expected)
    assert jax.tree.structure(state) == jax.tree.structure(expected_state)
    close(state.params, expected_state.params)


def test_rows_are_really_spread():
    """Bug: every device computes the whole batch, and nothing becomes faster."""
    mesh = devices(8)
    batch = put_batch(mesh, make_batch())
    assert {shard.data.shape for shard in batch.src_ids.addressable_shards} == {(2, 8)}


# ---- Padding ------------------------------------------------------------------------------------


@jax.jit
def measure(params: dict, batch: Batch) -> Metrics:
    return batch_metrics(MODEL, params, batch, 0.1, None)


def test_loss_does_not_depend_on_padding_or_company(params: dict):
    """Bug: F41, F45: padding has weight, is attended to, or shifts positions."""
    encoded = encode(random_pairs(6, seed=1))

    def sums(bucket: Bucket, pairs: list[int]) -> np.ndarray:
        return np.array(measure(params, collate(encoded, bucket, np.array(pairs)))[:4])

    expected = sums(Bucket(6, 8, 8), [0, 1, 2, 3, 4, 5])
    np.testing.assert_allclose(sums(Bucket(6, 8, 8), [3, 1, 5, 0, 2, 4]), expected, rtol=1e-5)
    wide = sums(Bucket(9, 13, 17), [0, 1, 2, 3, 4, 5])
    np.testing.assert_allclose(wide, expected, rtol=1e-5)
    parts = sums(Bucket(6, 8, 8), [0]) + sums(Bucket(6, 8, 8), [1, 2, 3, 4, 5])
    np.testing.assert_allclose(parts, expected, rtol=1e-5)
    alone = np.sum([sums(Bucket(1, 8, 8), [i]) for i in range(6)], 0)
    np.testing.assert_allclose(alone, expected, rtol=1e-5)


def test_ids_under_padding_do_not_matter(params: dict):
    """Bug: a mask is taken from the ids, or padding leaks into attention."""
    batch = make_batch()
    junk = np.random.default_rng(0).integers(4, VOCABULARY, batch.src_ids.shape).astype(np.int32)
    dirty = batch._replace(
        src_ids=np.where(batch.src_segments > 0, batch.src_ids, junk),
        tgt_in_ids=np.where(batch.tgt_segments > 0, batch.tgt_in_ids, junk),
        tgt_out_ids=np.where(batch.tgt_segments > 0, batch.tgt_out_ids, junk),
    )
    np.testing.assert_allclose(measure(params, dirty), measure(params, batch), rtol=1e-6)


def test_a_batch_of_filler_changes_nothing(one: Trainer, params: dict):
    """Bug: F38, F47: NaN from a device, or a batch, without a token."""
    empty = jax.tree.map(np.zeros_like, make_batch())
    state, (metrics,) = one.run(one.state(params), [empty])
    assert (metrics.loss, metrics.tokens, metrics.grad_norm) == (0, 0, 0)
    close(state.params, params, 0)


def test_evaluation_has_no_dropout_and_no_smoothing(params: dict):
    """Bug: F45: validation loss is smoothed, or random."""
    step, batch = compile_eval_step(MODEL, devices(1)), make_batch()
    metrics = step(params, batch)
    assert metrics.loss == metrics.nll == step(params, batch).nll
    np.testing.assert_allclose(metrics.nll, measure(params, batch).nll, rtol=1e-6)


# ---- Dropout ------------------------------------------------------------------------------------


def test_dropout_follows_seed_and_step(one: Trainer, params: dict):
    """Bug: F51: one mask for all steps; F107: after a resume the masks of the first steps again;
    the seed does not reach dropout."""
    batch = make_batch()

    def loss(trainer: Trainer, step: int) -> float:
        return float(trainer.run(trainer.state(params, step), [batch])[1][0].loss)

    losses = [loss(one, step) for step in (0, 1, 2, 100_000)]
    assert len(set(losses)) == 4
    assert losses == [loss(one, step) for step in (0, 1, 2, 100_000)]
    other = Trainer(replace(CONFIG, seed=2**31 - 1), devices(1))
    losses += [loss(other, step) for step in (0, 1)]
    assert len(set(losses)) == 6
    assert max(losses) - min(losses) < 0.5 * min(losses), "other masks, not another model"


# ---- The state ----------------------------------------------------------------------------------


def test_a_fresh_state_is_a_function_of_the_seed():
    """Bug: the seed does not reach the parameters, or something else does."""
    make = jax.jit(lambda seed: new_state(MODEL, make_optimizer(CONFIG), seed))
    one, again, other = (jax.tree.leaves(make(seed)) for seed in (1, 1, 2))
    assert all((a == b).all() for a, b in zip(one, again, strict=True))
    assert any((a != b).any() for a, b in zip(one, other, strict=True))


def test_a_shape_is_compiled_once(one: Trainer, params: dict):
    """Bug: F91, F117: the state that comes out is of another type than the one that went in."""
    state, _ = one.run(one.state(params), [make_batch()])
    before = one.step._cache_size()
    state, _ = one.run(state, [make_batch(seed=seed, count=16 - seed) for seed in range(4)])
    assert one.step._cache_size() == before
    state, _ = one.run(state, [make_batch(3, rows=4), make_batch(), make_batch(4, rows=4)])
    assert one.step._cache_size() == before + 1
    assert jax.tree.structure(state) == jax.tree.structure(one.abstract)
    for leaf, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(one.abstract), strict=True):
        assert (leaf.shape, leaf.dtype) == (wanted.shape, wanted.dtype)
        assert leaf.sharding == wanted.sharding


def test_optimizer_statistics_lie_with_their_parameters():
    """Bug: Adam's moments are replicated while the parameters are spread, and memory runs out."""
    abstract = abstract_state(MODEL, make_optimizer(CONFIG), devices(8, data=2, fsdp=2, model=2))
    adam, spread = abstract.opt_state[0], 0
    for moment in (adam.mu, adam.nu):
        for leaf, parameter in zip(
            jax.tree.leaves(moment), jax.tree.leaves(abstract.params), strict=True
        ):
            assert leaf.sharding == parameter.sharding
            spread += leaf.sharding.shard_shape(leaf.shape) != leaf.shape
    assert spread > 20 and adam.count.sharding.is_fully_replicated


def test_the_gradient_norm_is_that_of_the_gradient(one: Trainer, params: dict):
    """Bug: F47: the norm, or the update, is of the sum over tokens instead of their mean."""
    batch = make_batch()
    state, (metrics,) = one.run(one.state(params), [batch])

    @jax.jit
    @jax.grad
    def expected(params: dict) -> jax.Array:
        metrics = batch_metrics(MODEL, params, batch, 0.1, dropout_key(CONFIG.seed, 0))
        return metrics.loss / batch.tgt_segments.sum()

    # After one update from zero, Adam's first moment is (1 - b1) times the gradient.
    gradient = jax.tree.map(lambda m: np.asarray(m) / 0.1, state.opt_state[0].mu)
    close(gradient, expected(params))
    norm = math.sqrt(sum((leaf**2).sum() for leaf in jax.tree.leaves(gradient)))
    assert float(metrics.grad_norm) == pytest.approx(norm, rel=1e-5)


# ---- Learning -----------------------------------------------------------------------------------


def copy_batches(count: int) -> Iterator[Batch]:
    """Random sequences of 16 symbols, none of which starts as the tested ones do."""
    draw = np.random.default_rng(0)
    for _ in range(count):
        rows = []
        for length in draw.integers(1, 8, 64):
            ids = draw.integers(4, VOCABULARY, length)
            ids[0] = ids[0] if ids[0] % 4 else 5
            rows.append((ids.tolist(), ids.tolist()))
        yield collate(encode(rows), Bucket(64, 8, 8), np.arange(64))


def test_a_copy_task_is_learnt():
    """Bug: anything that keeps a Transformer from learning: a mask that leaks, a target shifted by
    two, a gradient that is cut, a decoder that steps otherwise than it was trained."""
    model = replace(
        CONFIG.model,
        d_model=32,
        d_ff=64,
        num_heads=4,
        norm_position="pre",
        dropout=0.0,
        embedding_dropout=0.0,
    )
    optimizer = OptimizerConfig(schedule="cosine", learning_rate=1e-2, warmup_steps=30)
    steps = 300
    config = replace(CONFIG, model=model, optimizer=optimizer, train=TrainConfig(steps=steps))
    trainer = Trainer(config, devices(1))
    state = trainer.state(jax.jit(Model(model).init)(jax.random.key(0)))
    state, metrics = trainer.run(state, list(copy_batches(steps)))
    assert metrics[-1].correct / metrics[-1].tokens > 0.99, "teacher-forced"

    draw = np.random.default_rng(1)
    sources = []
    for length in draw.integers(1, 8, 100):
        ids = draw.integers(4, VOCABULARY, length)
        ids[0] = draw.choice([4, 8, 12, 16])
        sources.append([*ids.tolist(), EOS])
    requests = [Request(source, len(source) + 5) for source in sources]
    engine = Engine([(Model(model), state.params)], VOCABULARY)
    found = engine.decode(BeamSearch(1, EOS, 0.0), requests, 4096)
    hits = total = 0
    for source, (hypothesis,) in zip(sources, found, strict=True):
        hits += sum(a == b for a, b in zip(source, hypothesis.ids, strict=False))
        total += max(len(source), len(hypothesis.ids))
    assert hits / total > 0.99, "free-running"
