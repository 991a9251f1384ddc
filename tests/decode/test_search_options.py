"""What the search can be told besides: bans, other rules, forced prefixes, draws."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.decode.sampling import sample
from transformer_jax.decode.search import DEAD, BeamSearch, beam_search

EOS, FIRST = 1, 2
V, B = 6, 12


@pytest.fixture(scope="module", autouse=True)
def quick(quick_compilation):
    """Many small programs."""


def step(token, parent, cache):
    """Logits by the last token alone: tables [B, V, V] of a Markov chain."""
    del parent
    return jnp.take_along_axis(cache, token[:, :, None], 1), cache


TABLES = np.random.default_rng(0).normal(0, 1.5, (B, V, V)).astype(np.float32)
TABLES[:, :, 0] = -1e6  # the engine bars padding as well


def search(limit=9, **options):
    run = functools.partial(
        beam_search,
        step,
        max_len=12,
        limit=np.full(B, limit, np.int32),
        eos_id=EOS,
        **({"beam_size": 3, "length_penalty": 0.6} | options),
    )
    found = jax.jit(run)(jnp.asarray(TABLES), np.full(B, FIRST, np.int32))
    return jax.tree.map(np.asarray, found)


def log_probs(table):
    wide = table.astype(np.float64)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


def words(row):
    """Ids of a hypothesis up to its EOS."""
    ids = row.tolist()
    return ids[: ids.index(EOS) + 1] if EOS in ids else [i for i in ids if i]


@pytest.mark.parametrize("least", [1, 4])
def test_no_hypothesis_is_shorter_than_asked(least):
    """Bug: EOS is barred one step too long or too short, or for live hypotheses only."""
    found = search(min_length=least)
    lengths = [len(words(r)) - 1 for b in range(B) for r in found.ids[b] if EOS in r.tolist()]
    assert min(lengths) == least  # the tables end most sentences as early as they may


@pytest.mark.parametrize("n", [1, 2, 3])
def test_no_ngram_comes_twice(n):
    """Bug: the hypothesis of another slot is looked at, or only the last n-gram."""
    free, banned = search(), search(no_repeat_ngram=n)

    def repeats(ids):
        ids = [i for i in ids if i]
        grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
        return len(grams) != len(set(grams))

    real = banned.score > DEAD / 10
    assert not any(repeats(words(r)) for b in range(B) for r in banned.ids[b][real[b]])
    assert any(repeats(words(r)) for b in range(B) for r in free.ids[b])


def reference(table, W, n, alpha, limit, rule):
    """Beams of lists in which 2W continuations are looked at and W always go on."""
    live, done = [(0.0, [])], []
    for length in range(1, limit + 1):
        candidates = [
            (total + log_prob, [*ids, token])
            for total, ids in live
            for token, log_prob in enumerate(log_probs(table)[ids[-1] if ids else FIRST])
        ]
        best = sorted(candidates, reverse=True)[: 2 * W]
        penalty = ((5 + length) / 6) ** alpha
        ends = [(rank, t, ids) for rank, (t, ids) in enumerate(best) if ids[-1] == EOS]
        if rule == "ctranslate2":
            ends = [end for end in ends if end[0] < W]
        done += [(t / penalty, t, ids) for _, t, ids in ends]
        live = [(t, ids) for t, ids in best if ids[-1] != EOS][:W]
        done.sort(reverse=True)
        if rule == "ctranslate2":
            first_ended = best[0][1][-1] == EOS
            if len(done) >= W or (alpha == 0 and first_ended and len(done) >= n):
                break
        elif len(done) >= n:
            reach = ((5 + limit) / 6) ** alpha
            if live[0][0] / reach <= done[n - 1][0]:
                break
    return done[:n]


@pytest.mark.parametrize("rule", ["authors", "ctranslate2"])
@pytest.mark.parametrize(("alpha", "n"), [(0.0, 1), (0.6, 1), (0.6, 3)])
def test_the_rules_of_other_toolkits(rule, alpha, n):
    """Bug: which of the 2W count as finished, or when a sentence is given up."""
    found = search(rule=rule, length_penalty=alpha, num_hypotheses=n)
    for b in range(B):
        want = reference(TABLES[b], 3, n, alpha, 9, rule)
        for i, (score, log_prob, ids) in enumerate(want):
            assert words(found.ids[b, i]) == ids
            np.testing.assert_allclose(found.log_prob[b, i], log_prob, rtol=1e-5)
            np.testing.assert_allclose(found.score[b, i], score, rtol=1e-5)


def test_a_search_in_parts_is_the_search_in_one():
    """Bug: the state forgets something between two calls."""
    beam = BeamSearch(3, EOS, 0.6)
    state = beam.start(jnp.asarray(TABLES), np.full(B, FIRST, np.int32), np.full(B, 9), 12)
    advance = jax.jit(lambda state, until: beam.advance(step, state, until))
    for until in range(1, 13):
        state = advance(state, until)
        assert int(state.time) <= until
    found, want = beam.finish(state), search()
    for one, other in zip(found, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-6)


def draw(number, **options):
    logits = np.log(np.asarray([0.02, 0.4, 0.28, 0.2, 0.06, 0.04], np.float32))
    flat = lambda token, parent, cache: (jnp.broadcast_to(logits, (*token.shape, V)), cache)
    run = functools.partial(sample, flat, jnp.zeros(()), max_len=1, eos_id=99, **options)
    found = jax.jit(run)(
        np.zeros(number, np.int32), limit=np.ones(number, np.int32), seed=np.arange(number)
    )
    return np.asarray(found.ids)[:, 0, 0], np.exp(logits)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({}, [0, 1, 2, 3, 4, 5]),
        ({"top_k": 2}, [1, 2]),
        ({"top_p": 0.5}, [1, 2]),  # 0.4 alone is less than 0.5
        ({"top_p": 0.4}, [1]),
        ({"top_p": 0.67}, [1, 2]),
        ({"top_p": 0.69}, [1, 2, 3]),
        ({"min_p": 0.4}, [1, 2, 3]),  # at least 0.16
        ({"top_k": 4, "min_p": 0.6}, [1, 2]),
        ({"temperature": 0.0}, [1]),
    ],
)
def test_draws_keep_to_the_likeliest_tokens(options, kept):
    """Bug: a cut by rank, share or mass off by one; the rest not renormalised."""
    drawn, probs = draw(6000, **options)
    share = np.bincount(drawn, minlength=V) / len(drawn)
    want = np.where(np.isin(np.arange(V), kept), probs, 0)
    np.testing.assert_allclose(share, want / want.sum(), atol=5 * math.sqrt(0.25 / 6000))
    assert set(np.flatnonzero(share)) <= set(kept)


def test_slots_are_draws_of_their_own_and_each_ends_alone():
    """Bugs: all slots draw the same, a slot that has ended goes on, or stops the others."""
    run = functools.partial(sample, step, max_len=12, eos_id=EOS, num_samples=4)
    found = jax.jit(run)(
        jnp.asarray(TABLES),
        np.full(B, FIRST, np.int32),
        limit=np.full(B, 9, np.int32),
        seed=np.arange(B),
    )
    found = jax.tree.map(np.asarray, found)
    assert len({tuple(words(r)) for b in range(B) for r in found.ids[b]}) > 2 * B
    for b in range(B):
        for ids, log_prob, finished in zip(
            found.ids[b], found.log_prob[b], found.finished[b], strict=True
        ):
            drawn = words(ids)
            assert finished == (drawn[-1] == EOS) and (finished or len(drawn) == 9)
            assert not ids[len(drawn) :].any()
            path = [FIRST, *drawn]
            total = sum(log_probs(TABLES[b])[i, j] for i, j in itertools.pairwise(path))
            np.testing.assert_allclose(log_prob, total, rtol=1e-5)
        order = found.finished[b].astype(int) * 1000 + found.log_prob[b]
        assert (np.diff(order) <= 1e-5).all()
