"""Requests in, results out: the search with the real cached model against the full forward pass."""

import dataclasses
import functools
import mmap
import sys

import jax
import numpy as np
import pytest

from transformer_jax.config import ConfigError, MeshConfig, ModelConfig
from transformer_jax.data.tokenizer import EOS, PAD, START, UNK
from transformer_jax.decode import engine as engine_module
from transformer_jax.decode.engine import LENGTHS, ROWS, TIMES, Engine, Request, rung
from transformer_jax.decode.search import BeamSearch
from transformer_jax.model import Model
from transformer_jax.sharding import make_mesh, param_shardings

VOCABULARY, TOKENIZER = 40, 34  # rows of the table, and pieces of the tokenizer
MODEL = Model(
    ModelConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        d_ff=24,
        num_heads=2,
        encoder_layers=1,
        decoder_layers=1,
        tied_embeddings="none",
    )
)
EXTRA, ALPHA = 4, 0.6


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Many small programs: compiling them costs more than running them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def random_params(seed=0, favoured=(EOS,), favour=2.0):
    """Parameters of a model that likes some ids."""
    rng = np.random.default_rng(seed)

    def draw(path, leaf):
        spread = 0.1 if leaf.ndim == 1 else leaf.shape[0] ** -0.5
        centre = 1.0 if path[-1].key == "scale" else 0.0
        return (centre + spread * rng.normal(size=leaf.shape)).astype(np.float32)

    params = jax.tree_util.tree_map_with_path(draw, MODEL.abstract_params())
    direction = np.ones(16, np.float32) / 4
    params["decoder_0"]["feed_forward_norm"]["bias"] += direction
    params["decoder_0"]["cross_attention"]["out"] *= 3
    for table in ("embedding", "source_embedding", "output_embedding"):
        params[table] = rng.normal(0, 0.4, (VOCABULARY, 16)).astype(np.float32)
    params["output_embedding"][list(favoured)] += favour * direction
    return params


PARAMS = random_params()


def search(sources, beam_size=3, num_hypotheses=0, params=PARAMS, batch_tokens=4096, extra=EXTRA):
    beam = BeamSearch(beam_size, EOS, ALPHA, num_hypotheses=num_hypotheses)
    requests = [Request(ids, len(ids) + extra) for ids in sources]
    return Engine([(MODEL, params)], TOKENIZER).decode(beam, requests, batch_tokens)


def random_sources(lengths, seed=0):
    rng = np.random.default_rng(seed)
    return [[*rng.integers(4, TOKENIZER, n - 1).tolist(), EOS] for n in lengths]


@functools.cache
def full_forward():
    return jax.jit(MODEL.apply)


def next_log_probs(source, ids):
    """By a full forward pass over the whole prefix, padded on the right; forbidden ids -inf."""
    src_ids, tgt_ids = np.full((1, 8), PAD, np.int32), np.full((1, 12), PAD, np.int32)
    src_ids[0, : len(source)] = source
    tgt_ids[0, : len(ids) + 1] = [START, *ids]
    segments = (src_ids != PAD).astype(np.int32), np.ones_like(tgt_ids)
    logits = full_forward()(PARAMS, src_ids, tgt_ids, *segments)
    wide = np.asarray(logits, np.float64)[0, len(ids)]
    log_probs = wide - wide.max() - np.log(np.exp(wide - wide.max()).sum())
    log_probs[[PAD, UNK, START, *range(TOKENIZER, VOCABULARY)]] = -np.inf
    return log_probs


@pytest.mark.parametrize("W", [1, 3])
def test_search_equals_a_beam_over_full_forward_passes(W):
    """Bugs (F70, F79, F85): the cache is not reordered with its hypotheses, is off by one in
    place or position, or sees the padding of the source; beam 1 is not greedy."""
    sources = random_sources(range(1, 9))
    found = search(sources, W)
    ended = 0
    for source, hypotheses in zip(sources, found, strict=True):
        limit = len(source) + EXTRA
        live, finished = [(0.0, ())], []
        for length in range(1, limit + 1):
            candidates = [
                (total + log_prob, (*ids, token))
                for total, ids in live
                for token, log_prob in enumerate(next_log_probs(source, ids))
            ]
            best = sorted(candidates, reverse=True)[:W]
            penalty = ((5 + length) / 6) ** ALPHA
            finished += [(t / penalty, t, ids, True) for t, ids in best if ids[-1] == EOS]
            live = [(t, ids) for t, ids in best if ids[-1] != EOS]
        penalty = ((5 + limit) / 6) ** ALPHA
        unfinished = sorted([(t / penalty, t, ids, False) for t, ids in live], reverse=True)
        want = (sorted(finished, reverse=True)[:W] + unfinished)[:W]
        assert len(hypotheses) == len(want) == W
        for got, (score, log_prob, ids, is_finished) in zip(hypotheses, want, strict=True):
            assert got.ids == list(ids)
            assert got.finished is is_finished
            np.testing.assert_allclose(got.log_prob, log_prob, rtol=1e-5, atol=1e-5)
            np.testing.assert_allclose(got.score, score, rtol=1e-5, atol=1e-5)
            ended += is_finished
    assert 0 < ended < 8 * W  # both kinds were there to compare


def test_log_prob_is_that_of_forced_scoring():
    """Bug (F67): EOS is counted in one of the two only, or probabilities are renormalised."""
    sources = random_sources(range(1, 9))
    found = search(sources)
    pairs = [(s, h) for s, some in zip(sources, found, strict=True) for h in some]
    assert any(len(h.ids) > 1 for _, h in pairs)
    scores = Engine([(MODEL, PARAMS)], TOKENIZER).score(
        [s for s, _ in pairs], [h.ids for _, h in pairs], 4096
    )
    for (_, hypothesis), score in zip(pairs, scores, strict=True):
        assert score.shape == (len(hypothesis.ids),)
        np.testing.assert_allclose(score.sum(), hypothesis.log_prob, rtol=1e-5, atol=1e-5)
        assert (score < 0).all()


def test_forced_scores_equal_the_full_forward_pass():
    """Bugs: scores in sorted order instead of the given one, of the wrong place, or of padding."""
    sources = random_sources([5, 2, 8, 3, 1])
    targets = random_sources([2, 6, 3, 1, 5], seed=1)
    scores = Engine([(MODEL, PARAMS)], TOKENIZER).score(sources, targets, 4096)
    for source, target, score in zip(sources, targets, scores, strict=True):
        want = [next_log_probs(source, target[:i])[t] for i, t in enumerate(target)]
        np.testing.assert_allclose(score, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("number", [1, 5, 8])
def test_each_source_gets_its_own_result_in_its_own_place(number):
    """Bugs (F75, F77): results in sorted order, a filler row returned, a sentence lost; equal
    sources with unequal results."""
    sources = random_sources([7, 1, 5, 3, 7, 2, 8, 4][:number])
    sources[-1] = sources[0]
    found = search(sources)
    assert len(found) == number
    assert [h.ids for h in found[-1]] == [h.ids for h in found[0]]
    for source, hypotheses in zip(sources, found, strict=True):
        (alone,) = search([source])
        assert [h.ids for h in hypotheses] == [h.ids for h in alone]
        np.testing.assert_allclose(
            [h.log_prob for h in hypotheses], [h.log_prob for h in alone], rtol=1e-5, atol=1e-5
        )
    assert search([]) == []


@pytest.mark.parametrize("W", [1, 3])
def test_ids_outside_the_tokenizer_are_never_chosen(W):
    """Bug (F26): padded rows of the table, padding or the start of a target win."""
    forbidden = {PAD, START, *range(TOKENIZER, VOCABULARY)}
    params = random_params(favoured=sorted(forbidden), favour=20.0)
    for hypotheses in search(random_sources(range(1, 9)), W, params=params):
        assert len(hypotheses) == W
        for hypothesis in hypotheses:
            assert hypothesis.ids and not forbidden & set(hypothesis.ids)
            # Each token cost the probability that the forbidden ones took; none was given back.
            assert hypothesis.log_prob < -3 * len(hypothesis.ids)


def test_parameters_that_are_not_finite_are_an_error():
    """Bug (F82): NaN loses every comparison, so each translation comes out empty."""
    sources = random_sources(range(1, 9))
    for name in ("embedding", "output_embedding"):
        params = {**PARAMS, name: np.full_like(PARAMS[name], np.nan)}
        for W in (1, 3):
            with pytest.raises(FloatingPointError, match="NaN"):
                search(sources, W, params=params)
    # One row of the source table: one sentence meets it.
    params = {**PARAMS, "source_embedding": PARAMS["source_embedding"].copy()}
    params["source_embedding"][sources[-1][0]] = np.nan
    with pytest.raises(FloatingPointError, match="NaN"):
        search(sources, params=params)
    engine = Engine([(MODEL, params)], TOKENIZER)
    with pytest.raises(FloatingPointError, match="NaN"):
        engine.score(sources, sources, 4096)


def test_a_table_smaller_than_the_tokenizer_is_an_error():
    """Bug (F25): ids beyond the table silently use its last row."""
    with pytest.raises(ConfigError, match=r"vocab-size: got 40, allowed: at least 41"):
        Engine([(MODEL, PARAMS)], VOCABULARY + 1)


# --- Shapes, batches, and what a batch does while it runs. ---


@pytest.fixture()
def programs(monkeypatch):
    """Every call of the two programs that take time: their names, shapes and static values."""
    record = []

    def watch(name):
        original = getattr(engine_module, name)

        def call(*arguments, **static):
            shapes = tuple(x.shape for x in jax.tree.leaves(arguments[1:]))
            record.append((name, arguments, shapes, tuple(static.items())))
            return original(*arguments, **static)

        call._cache_size = original._cache_size
        monkeypatch.setattr(engine_module, name, call)

    watch("_start")
    watch("_advance")
    return record


def test_a_hundred_lengths_need_a_bounded_number_of_programs(programs):
    """Bug (F78, F117): a program for each length, or for each size of the last batch."""
    sources = random_sources(range(2, 102))
    search(sources, 1)
    first = {(name, shapes, static) for name, _, shapes, static in programs}
    widths = sum(length < 2 * 102 for length in LENGTHS)
    assert len(first) <= widths + widths * sum(t < 2 * 102 for t in TIMES)
    programs.clear()
    search(sources[::-1], 1)
    assert {(name, shapes, static) for name, _, shapes, static in programs} == first


def test_the_second_pass_compiles_nothing():
    """Bug (F78): a static value that is new in each call, so that the cache never hits."""
    sources = random_sources([3, 9, 12, 4, 8, 2, 6, 1])
    names = ("_start", "_advance", "_finish", "_grow", "_take_rows")
    sizes = lambda: [getattr(engine_module, name)._cache_size() for name in names]
    search(sources, 1)
    before = sizes()
    search(sources[::-1], 1)
    search(random_sources([5, 2, 11, 10], seed=3), 1, params=random_params(4))
    assert sizes() == before
    assert before[0] > 0


def test_the_first_steps_share_the_program_of_the_next_ones(programs):
    """Bug: a weakly typed number in the first state, for which JAX compiles all steps once more."""
    search(random_sources([3, 9]), 1)
    states = [arguments[1] for name, arguments, *_ in programs if name == "_advance"]
    assert not any(x.weak_type for state in states for x in jax.tree.leaves(state))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux counts memory maps")
def test_programs_are_dropped_before_memory_maps_run_out():
    """Bug: a process with a few hundred programs, as of callers that choose options freely, ends in
    a segmentation fault."""
    sources = random_sources([3, 9])
    kinds = range(1, 4)
    found = [search(sources, 3, num_hypotheses=n) for n in kinds]
    assert engine_module._start._cache_size() >= len(kinds)
    # Neighbours of unlike protection stay maps of their own.
    protections = (mmap.PROT_READ, mmap.PROT_READ | mmap.PROT_WRITE)
    held = [mmap.mmap(-1, 4096, prot=protections[i % 2]) for i in range(33_000)]
    assert [search(sources, 3, num_hypotheses=n) for n in kinds] == found
    assert engine_module._start._cache_size() == 1
    for page in held:
        page.close()


def test_every_source_is_given_whole_with_its_own_limit(programs):
    """Bugs (F74, F77, F117): a source cut or mixed with its neighbour, a limit of the longest,
    filler rows that are searched, batches beyond the budget."""
    lengths = [9, 1, 5, 3, 130, 8, 17, 64, 65, 2, *range(1, 40)]
    sources = random_sources(lengths, seed=5)
    budget = 512
    search(sources, 1, batch_tokens=budget, extra=0)
    seen = []
    for name, arguments, *_ in programs:
        if name != "_start":
            continue
        _, src_ids, prompt, prompt_length, limit, _ = arguments
        rows, width = src_ids.shape
        assert rows in ROWS and width in LENGTHS
        assert rows == 1 or rows * width <= budget
        assert (prompt == START).all() and (prompt_length == 1).all()
        for ids, most in zip(src_ids.tolist(), limit.tolist(), strict=True):
            length = sum(i != PAD for i in ids)
            assert most == length
            assert not any(ids[length:])
            seen += [ids[:length]] if length else []
    assert sorted(seen) == sorted(sources)


@pytest.mark.parametrize("W", [1, 3])
def test_a_batch_that_shrinks_and_grows_gives_the_same(W, monkeypatch):
    """Bugs: hypotheses change owners when rows leave, the cache loses its past when it grows, or
    a sentence that has ended is taken along and searched again."""
    sources = random_sources([1 + i % 8 for i in range(30)], seed=2)
    one_by_one = [search([source], W, extra=30)[0] for source in sources]
    monkeypatch.setattr(engine_module, "TIMES", (2, 4, 8, 16, 32, 64))
    monkeypatch.setattr(engine_module, "COMPACT_FROM", 0)
    rows = []
    original = engine_module._advance
    monkeypatch.setattr(
        engine_module,
        "_advance",
        lambda params, state, *rest, **static: (
            rows.append(state.ids.shape),
            original(params, state, *rest, **static),
        )[1],
    )
    together = search(sources, W, extra=30)
    assert len({shape[0] for shape in rows}) > 2 and len({shape[2] for shape in rows}) > 3
    for alone, shared in zip(one_by_one, together, strict=True):
        assert [h.ids for h in alone] == [h.ids for h in shared]
        scores = [[(h.log_prob, h.score) for h in some] for some in (alone, shared)]
        np.testing.assert_allclose(scores[0], scores[1], rtol=1e-5, atol=1e-5)


def test_a_forced_prefix_is_kept_and_counted():
    """Bugs: the prefix is fed twice or at other positions, its log_prob or its length is lost."""
    engine = Engine([(MODEL, PARAMS)], TOKENIZER)
    sources = random_sources([5, 3, 8, 6], seed=9)
    prefixes = [[7, 9, 11], [], [5], [6, 6, 6, 6, 30]]
    requests = [
        Request(source, len(source) + EXTRA, prefix)
        for source, prefix in zip(sources, prefixes, strict=True)
    ]
    found = engine.decode(BeamSearch(3, EOS, ALPHA), requests, 4096)
    for source, prefix, hypotheses in zip(sources, prefixes, found, strict=True):
        for h in hypotheses:
            assert h.ids[: len(prefix)] == prefix
            assert len(h.ids) <= len(source) + EXTRA
            (scores,) = engine.score([source], [h.ids], 4096)
            assert h.log_prob == pytest.approx(scores.sum(), abs=1e-4)
            penalty = ((5 + len(h.ids)) / 6) ** ALPHA
            assert h.score == pytest.approx(h.log_prob / penalty, rel=1e-5)
    free = engine.decode(BeamSearch(3, EOS, ALPHA), [Request(sources[1], 7)], 4096)[0]
    assert [h.ids for h in free] == [h.ids for h in found[1]]


def test_an_ensemble_of_one_model_twice_is_that_model():
    """Bug: logits of several models are summed, or one model's cache serves both."""
    sources = random_sources([4, 6, 3], seed=4)
    requests = [Request(ids, len(ids) + EXTRA) for ids in sources]
    beam = BeamSearch(3, EOS, ALPHA)
    twice = Engine([(MODEL, PARAMS)] * 2, TOKENIZER).decode(beam, requests, 4096)
    for one, two in zip(search(sources), twice, strict=True):
        assert [h.ids for h in one] == [h.ids for h in two]
        np.testing.assert_allclose([h.log_prob for h in one], [h.log_prob for h in two], rtol=1e-5)
    other = random_params(seed=8)
    engine = Engine([(MODEL, PARAMS), (MODEL, other)], TOKENIZER)
    best = engine.decode(beam, requests[:1], 4096)[0][0]
    (both,) = engine.score(sources[:1], [best.ids], 4096)
    single = [
        Engine([(MODEL, p)], TOKENIZER).score(sources[:1], [best.ids], 4096)[0]
        for p in (PARAMS, other)
    ]
    np.testing.assert_allclose(both, np.log(np.exp(single).mean(0)), atol=1e-4)
    assert best.log_prob == pytest.approx(both.sum(), abs=1e-4)


@pytest.mark.parametrize(("tokens", "length"), [(1, 8), (8, 8), (9, 16), (512, 512), (513, 1024)])
def test_lengths_are_rounded_up(tokens, length):
    """Bug: a source of exactly a listed length is cut, or goes one shape too high."""
    assert rung(tokens, LENGTHS) == length


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 4, 2), (4, 1, 2)])
def test_a_mesh_finds_what_one_device_finds(sizes):
    """Bugs: rows on different devices are mixed, a row short of the mesh is lost, or the cache of
    split heads is reordered by the wrong parents."""
    mesh = make_mesh(MeshConfig(*sizes))
    shapes = MODEL.abstract_params()
    params = jax.device_put(PARAMS, param_shardings(mesh, MODEL.logical_axes(), shapes))
    spread = sizes[1:] != (1, 1)
    assert spread != all(x.is_fully_replicated for x in jax.tree.leaves(params))
    sources = random_sources([3, 9, 12, 4, 8, 2, 6, 1, 5, 7, 11])
    requests = [Request(ids, len(ids) + 20) for ids in sources]
    beam = BeamSearch(3, EOS, ALPHA)
    found = Engine([(MODEL, params)], TOKENIZER, mesh).decode(beam, requests, 4096)
    for some, want in zip(found, search(sources, extra=20), strict=True):
        assert [h.ids for h in some] == [h.ids for h in want]
        got, expected = ([h.log_prob for h in all_] for all_ in (some, want))
        np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-5)


def test_bfloat16_keeps_close_to_float32():
    """Bug (F42): sums, softmax or scores in bfloat16; exact text is promised for float32 only."""
    half = Model(dataclasses.replace(MODEL.config, dtype="bfloat16"))
    sources = random_sources([5, 9, 12, 4])
    requests = [Request(ids, len(ids) + EXTRA) for ids in sources]
    found = Engine([(half, PARAMS)], TOKENIZER).decode(BeamSearch(3, EOS, ALPHA), requests, 4096)
    targets = [some[0].ids for some in found]
    exact = Engine([(MODEL, PARAMS)], TOKENIZER).score(sources, targets, 4096)
    for some, want in zip(found, exact, strict=True):
        assert some[0].log_prob == pytest.approx(want.sum(), abs=0.02 * len(want))
        assert some[0].log_prob != want.sum()
