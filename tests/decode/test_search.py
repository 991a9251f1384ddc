"""The search against enumeration of every sequence, and against a beam of Python lists.

No network: a step function here reads a random table, by the whole history of a hypothesis. The
history travels in the cache, so a cache that is not reordered by `parent` changes every result.
"""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from transformer_jax.decode import search
from transformer_jax.decode.search import beam_search, greedy_search, length_penalty

FIRST = 2  # the first token in every test; not part of any result
SAME = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture(scope="module", autouse=True)
def quick_compilation():
    """Many small programs: compiling them costs more than running them."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def table_step(token, parent, cache):
    """Logits of a node in a tree of histories; node 0 is the root, children are numbered."""
    tables, node = cache  # [B, nodes, V], [B, W]
    if parent is not None:
        node = jnp.take_along_axis(node, parent, 1)
    node = node * tables.shape[2] + token + 1
    return jnp.take_along_axis(tables, node[:, :, None], 1), (tables, node)


def markov_step(token, parent, cache):
    """Logits by the time and the last token: [B, times, V, V]; the last time goes on for ever."""
    tables, time = cache
    now = tables[:, jnp.minimum(time, tables.shape[1] - 1)]
    return jnp.take_along_axis(now, token[:, :, None], 1), (tables, time + 1)


@functools.partial(jax.jit, static_argnames=("W", "n", "max_len", "alpha", "eos", "step"))
def _run(tables, limit, allowed, *, W, n, max_len, alpha, eos, step):
    B = tables.shape[0]
    state = jnp.zeros((B, W) if step is table_step else (), jnp.int32)
    return beam_search(
        step,
        (tables, state),
        jnp.full((B,), FIRST, jnp.int32),
        beam_size=W,
        max_len=max_len,
        limit=limit,
        length_penalty=alpha,
        eos_id=eos,
        num_hypotheses=n,
        allowed=allowed,
    )


def run(tables, limit, W, *, n=None, max_len=6, alpha=0.6, eos=1, step=table_step, allowed=None):
    """Results of each table. Filler rows (limit 0) bring most tests to one compiled shape."""
    rows, full = len(tables), 1 if len(tables) == 1 else 40
    pad = lambda x: np.concatenate([x, np.zeros((full - rows, *x.shape[1:]), x.dtype)])
    found = _run(
        pad(np.asarray(tables, np.float32)),
        pad(np.asarray(limit, np.int32)),
        np.ones(tables.shape[-1], bool) if allowed is None else np.asarray(allowed),
        W=W,
        n=n or W,
        max_len=max_len,
        alpha=alpha,
        eos=eos,
        step=step,
    )
    return jax.tree.map(lambda x: np.asarray(x)[:rows], found)


def random_tables(seed, B, V, depth, spread=1.5):
    """One table of logits for each sentence and each history of up to `depth` tokens."""
    nodes = (V ** (depth + 1) - 1) // (V - 1)
    return np.random.default_rng(seed).normal(0, spread, (B, nodes, V)).astype(np.float32)


def log_probs_of(logits):
    wide = np.asarray(logits, np.float64)
    return wide - np.log(np.exp(wide - wide.max()).sum()) - wide.max()


def table_log_probs(table):
    """The same tree as table_step, for Python: tuple of ids -> float64 [V]."""
    V = table.shape[1]

    def next_log_probs(ids):
        return log_probs_of(table[functools.reduce(lambda n, t: n * V + t + 1, (FIRST, *ids), 0)])

    return next_log_probs


def markov_log_probs(table):
    return lambda ids: log_probs_of(table[min(len(ids), len(table) - 1), (FIRST, *ids)[-1]])


def penalty(length, alpha):
    return math.pow((5 + length) / 6, alpha)


def exhaustive(next_log_probs, V, limit, alpha, eos, n):
    """Every sequence there is: the finished ones by score, then the unfinished ones."""
    finished, unfinished = [], []
    tokens = [t for t in range(V) if t != eos]
    for length in range(limit + 1):
        for ids in itertools.product(tokens, repeat=length):
            total = sum(next_log_probs(ids[:i])[t] for i, t in enumerate(ids))
            if length < limit:
                whole = total + next_log_probs(ids)[eos]
                finished.append((whole / penalty(length + 1, alpha), whole, (*ids, eos), True))
            else:
                unfinished.append((total / penalty(length, alpha), total, ids, False))
    best_first = lambda rows: sorted(rows, key=lambda row: -row[0])
    return (best_first(finished) + best_first(unfinished))[:n]


def reference_beam(next_log_probs, W, limit, alpha, eos, n, stop):
    """The rule of the design in lists: (results, number of steps).

    stop: end where no live hypothesis can still win; without it the loop runs to the limit, so
    that a rule that stops too early shows.
    """
    live, finished, steps = [(0.0, ())], [], 0
    for length in range(1, limit + 1):
        steps += 1
        candidates = [
            (total + log_prob, (*ids, token))
            for total, ids in live
            for token, log_prob in enumerate(next_log_probs(ids))
        ]
        best = sorted(candidates, key=lambda c: -c[0])[:W]
        finished += [
            (total / penalty(length, alpha), total, ids, True)
            for total, ids in best
            if ids[-1] == eos
        ]
        live = [(total, ids) for total, ids in best if ids[-1] != eos]
        finished = sorted(finished, key=lambda f: -f[0])[:n]
        if not live:
            break
        if stop and len(finished) == n:
            reach = penalty(limit if alpha >= 0 else min(length + 1, limit), alpha)
            if live[0][0] / reach <= finished[-1][0]:
                break
    unfinished = [(total / penalty(len(ids), alpha), total, ids, False) for total, ids in live]
    return (finished + sorted(unfinished, key=lambda u: -u[0]))[:n], steps


def assert_row_equals(found, row, want):
    """One sentence's results against (score, log_prob, ids, finished), in order."""
    for i, (score, log_prob, ids, finished) in enumerate(want):
        got = found.ids[row, i]
        assert got.tolist() == [*ids, *[0] * (len(got) - len(ids))], (row, i)
        assert bool(found.finished[row, i]) is finished, (row, i)
        np.testing.assert_allclose(found.log_prob[row, i], log_prob, **SAME)
        np.testing.assert_allclose(found.score[row, i], score, **SAME)


# --- Against the truth. ---


@pytest.mark.parametrize(
    ("V", "alpha", "eos"), [(5, -0.5, 1), (5, 0.0, 4), (4, 0.6, 0), (4, 1.0, 3)]
)
def test_a_wide_beam_is_exhaustive_search(V, alpha, eos):
    """Bugs (F65, F67, F69): a hypothesis lost, a length off by one, another penalty, an early
    stop; anything that is not the best sequences in order."""
    B, L, n = 24, 4, 6
    tables = random_tables(V, B, V, L)
    limit = 1 + np.arange(B) % L
    found = run(tables, limit, W=(V - 1) ** (L - 1) * V, n=n, alpha=alpha, eos=eos)
    for row in range(B):
        want = exhaustive(table_log_probs(tables[row]), V, int(limit[row]), alpha, eos, n)
        assert_row_equals(found, row, want)


@pytest.mark.parametrize(
    ("W", "n", "alpha"),
    [
        (1, 1, 0.6),
        (2, 1, -0.5),
        (2, 2, 0.6),
        (3, 3, 0.0),
        (3, 1, 1.0),
        (4, 4, 0.6),
        (4, 1, 0.6),
    ],
)
@pytest.mark.parametrize("stop", [True, False])
def test_a_beam_equals_the_rule_in_lists(W, n, alpha, stop):
    """Bugs (F65, F66, F70, F73): a cache not reordered, finished hypotheses that keep their slot
    or go on, the wrong W, a stop that comes too early (stop=False: the stop may lose nothing)."""
    B, V, L = 40, 5, 5
    tables = random_tables(100, B, V, L)
    limit = 1 + np.arange(B) % L
    found = run(tables, limit, W, n=n, alpha=alpha)
    for row in range(B):
        arguments = table_log_probs(tables[row]), W, int(limit[row]), alpha, 1, n
        assert_row_equals(found, row, reference_beam(*arguments, stop)[0])


@pytest.mark.parametrize("alpha", [0.6, -0.5])
def test_long_sentences_equal_the_rule_in_lists(alpha):
    """Bug: right for a few steps only, for instance in the place where a token is written."""
    B, V, L, W = 12, 6, 24, 4
    tables = np.random.default_rng(7).normal(0, 1, (B, L, V, V)).astype(np.float32)
    tables[..., 1] -= 2.5  # EOS is rare, so that sentences get long
    limit = 2 * (1 + np.arange(B))
    found = run(tables, limit, W, max_len=L, alpha=alpha, step=markov_step)
    for row in range(B):
        arguments = markov_log_probs(tables[row]), W, int(limit[row]), alpha, 1, W
        assert_row_equals(found, row, reference_beam(*arguments, stop=True)[0])
    assert found.finished[:, 0].any() and (np.argmax(found.ids == 1, -1) > 8).any()


def test_a_large_vocabulary_equals_the_rule_in_lists():
    """Bug: the search by blocks of the vocabulary loses a candidate, or its token or parent."""
    B, V, L, W = 6, 700, 6, 3
    tables = np.random.default_rng(8).normal(0, 3, (B, 1, V, V)).astype(np.float32)
    tables[..., 1] += 7
    found = run(tables, [L] * B, W, step=markov_step)
    for row in range(B):
        arguments = markov_log_probs(tables[row]), W, L, 0.6, 1, W
        assert_row_equals(found, row, reference_beam(*arguments, stop=True)[0])


def test_beam_one_is_the_greedy_loop():
    """Bug (F85): greedy and beam 1 have rules of their own for EOS, length or score."""
    B, V, L = 40, 5, 5
    tables = random_tables(3, B, V, L)
    limit = np.asarray([2, 5] * (B // 2), np.int32)
    beam = run(tables, limit, 1, alpha=0.6)
    greedy = jax.jit(
        greedy_search, static_argnums=0, static_argnames=("max_len", "length_penalty")
    )(
        table_step,
        (tables, np.zeros((B, 1), np.int32)),
        np.full(B, FIRST),
        max_len=6,
        limit=limit,
        eos_id=1,
        length_penalty=0.6,
    )
    for row in range(B):
        ids, total, next_log_probs = (), 0.0, table_log_probs(tables[row])
        while len(ids) < limit[row] and ids[-1:] != (1,):
            log_probs = next_log_probs(ids)
            total += log_probs.max()
            ids = (*ids, int(log_probs.argmax()))
        want = [(total / penalty(len(ids), 0.6), total, ids, ids[-1] == 1)]
        assert_row_equals(beam, row, want)
        assert_row_equals(greedy, row, want)


# --- By hand. ---


def chain(V, transitions):
    """Two equal Markov tables of log-probabilities: {last: {next: probability}}."""
    table = np.full((2, 1, V, V), -30.0)
    for last, row in transitions.items():
        for token, probability in row.items():
            table[:, 0, last, token] = math.log(probability)
    return table


def test_penalty_at_three_lengths():
    """Bug (F69): another formula, such as length ** alpha; alpha 0 must not count at all."""
    np.testing.assert_allclose(length_penalty(1, 1.0), 1.0, rtol=1e-6)
    np.testing.assert_allclose(length_penalty(7, 1.0), 2.0, rtol=1e-6)
    np.testing.assert_allclose(length_penalty(13, 0.6), 1.9331820, rtol=1e-6)  # 3 ** 0.6
    np.testing.assert_allclose(length_penalty(7, -0.5), 0.70710678, rtol=1e-6)
    assert [float(length_penalty(n, 0.0)) for n in (1, 7, 13)] == [1.0] * 3
    np.testing.assert_allclose(length_penalty(9, 0.5, "power"), 3.0, rtol=1e-6)


def test_the_search_goes_on_after_the_first_end():
    """Bug (F65): the first finished hypothesis is returned although a longer one scores more."""
    # EOS at once: ln 0.5 / 1 = -0.6931. By 3, 4, 0, EOS: ln 0.4 / (9 / 6) = -0.6109. After one
    # step the longer one stands at ln 0.4 / (7 / 6) = -0.7854: a bound by the next length stops.
    table = chain(5, {2: {1: 0.5, 3: 0.4, 0: 0.1}, 3: {4: 1.0}, 4: {0: 1.0}, 0: {1: 1.0}})
    found = run(table, [6, 6], 2, n=1, alpha=1.0, step=markov_step)
    assert found.ids[0, 0].tolist() == [3, 4, 0, 1, 0, 0]
    np.testing.assert_allclose(found.log_prob[0, 0], math.log(0.4), rtol=1e-5)
    np.testing.assert_allclose(found.score[0, 0], -0.6109, atol=5e-5)
    # Without the penalty the short one is better: -0.6931 against -0.9163.
    found = run(table, [6, 6], 2, n=1, alpha=0.0, step=markov_step)
    assert found.ids[0, 0].tolist() == [1, 0, 0, 0, 0, 0]


def test_length_counts_eos_once():
    """Bug (F67): lengths 1 and 2 of equal log_prob; alpha 1: ln 0.3 / 1 and ln 0.3 / (7 / 6)."""
    table = chain(5, {2: {1: 0.3, 3: 0.6, 0: 0.1}, 3: {1: 0.5, 0: 0.5}, 0: {0: 1.0}})
    found = run(table, [3, 3], 4, n=2, alpha=1.0, step=markov_step)
    assert found.ids[0, :, :3].tolist() == [[3, 1, 0], [1, 0, 0]]
    np.testing.assert_allclose(found.log_prob[0], [math.log(0.3)] * 2, rtol=1e-6)
    np.testing.assert_allclose(found.score[0], [-1.0319767, -1.2039728], rtol=1e-6)


@pytest.mark.parametrize("W", [1, 4])
def test_eos_comes_once_and_last(W):
    """Bug (F66): a scorer that prefers token 3 after EOS drags finished hypotheses on."""
    table = chain(5, {last: {1: 0.6, 3: 0.3, 4: 0.1} for last in range(5)} | {1: {3: 1.0}})
    found = run(table, [6, 6], W, step=markov_step)
    for ids, log_prob in zip(found.ids[0], found.log_prob[0], strict=True):
        end = ids.tolist().index(1)
        assert not ids[end + 1 :].any()
        want = sum(math.log({1: 0.6, 3: 0.3, 4: 0.1}[t]) for t in ids[: end + 1].tolist())
        np.testing.assert_allclose(log_prob, want, rtol=1e-5)
    assert found.finished.all()


def test_hypotheses_are_distinct_and_best_first():
    """Bug (F71): all slots start alike, so the first step takes one token W times. Also with
    every score tied."""
    tables = np.concatenate([random_tables(4, 20, 5, 5), np.zeros((1, 3906, 5))])
    found = run(tables, [4] * 21, 4)
    for row in range(21):
        assert len({tuple(ids) for ids in found.ids[row].tolist()}) == 4
        finished = found.finished[row].tolist()
        assert finished == sorted(finished, reverse=True)
        for part in (found.score[row][finished], found.score[row][np.logical_not(finished)]):
            assert (np.diff(part) <= 0).all()


@pytest.mark.parametrize("W", [1, 4])
def test_nothing_ends_before_the_limit(W):
    """Bug (F73): no result, fewer than were asked for, or an EOS that the model never gave."""
    tables = random_tables(5, 8, 5, 5)
    tables[:, :, 1] = -40.0
    limit = np.asarray([1, 2, 3, 4, 5, 3, 2, 4])
    found = run(tables, limit, W)
    assert not found.finished.any()
    for row in range(8):
        want, _ = reference_beam(table_log_probs(tables[row]), W, int(limit[row]), 0.6, 1, W, True)
        assert_row_equals(found, row, want)
        assert {len(ids) for _, _, ids, _ in want} == {limit[row]}
        assert not (found.ids[row] == 1).any()


def test_live_hypotheses_fill_the_list():
    """Bug (F73): one hypothesis finished, four were asked for, three are lost."""
    V = 5
    table = chain(V, {2: {1: 0.2, 3: 0.5, 4: 0.3}, 3: {3: 0.7, 4: 0.3}, 4: {3: 0.6, 4: 0.4}})
    found = run(table, [3, 3], 4, step=markov_step)
    assert found.finished[0].tolist() == [True, False, False, False]
    assert found.ids[0, :, :3].tolist() == [[1, 0, 0], [3, 3, 3], [4, 3, 3], [3, 3, 4]]
    want = [math.log(p) for p in (0.2, 0.5 * 0.7 * 0.7, 0.3 * 0.6 * 0.7, 0.5 * 0.7 * 0.3)]
    np.testing.assert_allclose(found.log_prob[0], want, rtol=1e-5)


def test_a_beam_larger_than_the_vocabulary():
    """Bug (F83): top_k of more entries than there are."""
    V, W, L = 3, 8, 4
    tables = random_tables(6, 10, V, L)
    found = run(tables, [L] * 10, W)
    for row in range(10):
        want, _ = reference_beam(table_log_probs(tables[row]), W, L, 0.6, 1, W, True)
        assert_row_equals(found, row, want)


def test_fewer_hypotheses_than_were_asked_for_exist():
    """Bug: a hypothesis is repeated to fill the list. The rest have a score no sentence has."""
    tables = random_tables(6, 2, 3, 4)
    found = run(tables, [1, 1], 8)  # three sequences of one token
    assert (found.score[:, :3] > -1e29).all()
    assert (found.score[:, 3:] < -1e29).all()
    assert not found.finished[:, 3:].any()
    assert not found.ids[:, 3:].any()


# --- Sentences, and what they may not know of one another. ---


def test_sentences_of_a_batch_never_mix():
    """Bug (F70): batch and beam are mixed in a reshape. Sentence b knows tokens of its own only,
    and its results do not change with its place or its company."""
    B, per, W = 6, 3, 4
    V = 2 + B * per
    rng = np.random.default_rng(9)
    tables = np.full((B, 1, V, V), -30.0)
    own = [range(2 + per * b, 2 + per * (b + 1)) for b in range(B)]
    for b in range(B):
        tables[b, 0][:, own[b]] = rng.normal(0, 1, (V, per))
        tables[b, 0, :, 1] = -1.0
    found = run(tables, [6] * B, W, step=markov_step)
    for b in range(B):
        assert set(found.ids[b].ravel().tolist()) <= {0, 1, *own[b]}
        assert len(set(found.ids[b].ravel().tolist())) > 2
    shuffled = rng.permutation(B)
    again = run(tables[shuffled], [6] * B, W, step=markov_step)
    for a, b in zip(found, again, strict=True):
        np.testing.assert_array_equal(a[shuffled], b)
    alone = run(tables[2:3], [6], W, step=markov_step)
    np.testing.assert_array_equal(alone.ids[0], found.ids[2])
    np.testing.assert_allclose(alone.log_prob[0], found.log_prob[2], **SAME)


@pytest.mark.parametrize(("W", "n", "alpha"), [(4, 1, 0.6), (2, 1, -0.5)])
def test_the_limit_of_another_sentence_changes_nothing(W, n, alpha):
    """Bug (F74): the limit, or the penalty of the stop rule, is that of the longest neighbour."""
    B = 12
    tables = random_tables(10, B, 5, 5)
    tables[:, :, 1] -= 3.0
    limit = np.asarray([2, 3, 4] * 4)
    few = run(tables, limit, W, n=n, alpha=alpha)
    limit[1::2] = 5
    many = run(tables, limit, W, n=n, alpha=alpha)
    for a, b in zip(few, many, strict=True):
        np.testing.assert_array_equal(a[0::2], b[0::2])
    assert (few.ids[1::2] != many.ids[1::2]).any()


def test_a_limit_beyond_the_buffer_is_the_buffer():
    """Bug (F79): steps past the end overwrite the last place of result and cache."""
    table = chain(5, {last: {3: 0.6, 4: 0.4} for last in range(5)})
    long, right = (run(table, [limit] * 2, 4, step=markov_step) for limit in (9, 6))
    for a, b in zip(long, right, strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_filler_row_does_no_work():
    """Bug (F77): a row of limit 0 gets tokens, or keeps the others from ending."""
    tables = random_tables(12, 3, 5, 5)
    found = run(tables, [4, 0, 3], 2)
    assert not found.ids[1].any()
    assert not found.finished[1].any()
    for row, limit in ((0, 4), (2, 3)):
        want, _ = reference_beam(table_log_probs(tables[row]), 2, limit, 0.6, 1, 2, True)
        assert_row_equals(found, row, want)


@pytest.mark.parametrize("W", [1, 4])
def test_forbidden_tokens_are_never_chosen(W):
    """Bug (F26): ids beyond the tokenizer win; or the others' probabilities are raised."""
    B, V, L = 12, 5, 5
    tables = random_tables(13, B, V, L)
    tables[:, :, 3] += 5.0  # the likeliest token, and forbidden
    allowed = np.asarray([False, True, True, False, True])
    found = run(tables, [L] * B, W, allowed=allowed)
    for row in range(B):
        plain = table_log_probs(tables[row])
        masked = lambda ids, plain=plain: np.where(allowed, plain(ids), -np.inf)
        want, _ = reference_beam(masked, W, L, 0.6, 1, W, True)
        assert_row_equals(found, row, want)


@pytest.mark.parametrize("W", [1, 4])
def test_nan_is_seen_and_stays_in_its_sentence(W):
    """Bug (F82): NaN loses every comparison, so the sentence ends as if it had no translation.
    A NaN with its sign set, as x86 makes them, even sorts below everything."""
    tables = random_tables(14, 4, 5, 5)
    tables[:, :, 1] -= 9.0
    sound = run(tables, [4] * 4, W)
    tables[1, 4:] = -np.float32(np.nan)  # after the first token; node 3 holds the first step
    tables[2, 3, 0] = np.nan  # one logit of the first step
    best = int(tables[3, 3].argmax())
    tables[3, 3 * 5 + best + 1] = -np.float32(np.nan)  # one of the live hypotheses
    assert np.signbit(tables[1, 4:]).all()
    found = run(tables, [4] * 4, W)
    assert np.isnan(found.log_prob[1:, 0]).all()
    assert np.isnan(found.score[1:, 0]).all()
    assert not found.finished[1:, 0].any()
    for a, b in zip(sound, found, strict=True):
        np.testing.assert_array_equal(a[0], b[0])


# --- The parts. ---


def full_sort(total, W):
    """W best of [B, slots, V]; among equals the first slot, then the first token."""
    B, _, V = total.shape
    order = np.argsort(-total.reshape(B, -1), axis=-1, kind="stable")[:, :W]
    return np.take_along_axis(total.reshape(B, -1), order, 1), order // V, order % V


@pytest.mark.parametrize("W", [1, 2, 5, 8])
@pytest.mark.parametrize("kind", ["normal", "ties", "one block", "mostly dead"])
def test_best_by_blocks_is_a_full_sort(W, kind):
    """Bug: the best W lie in one block, on a border or in the last, unfilled block; ties."""
    rng = np.random.default_rng(W)
    B, V = 7, 2311  # a prime: blocks never divide it
    total = rng.normal(size=(B, W, V)).astype(np.float32)
    if kind == "ties":
        total = np.floor(2 * total)
    if kind == "one block":
        total[:, 0, 64:72] += 100
        total[:, -1, -3:] += 100
    if kind == "mostly dead":
        total[:, 1:] = search.DEAD
        total[:, 0, 5:] = search.DEAD
    found = jax.jit(search._best, static_argnums=1)(total, W)
    for got, want in zip(found, full_sort(total, W), strict=True):
        np.testing.assert_array_equal(got, want)


def test_a_single_slot_needs_no_reorder():
    """Bug: greedy pays for a gather of the whole cache at each step."""
    seen = []

    def step(token, parent, cache):
        seen.append(parent)
        return jnp.zeros((*token.shape, 4)), cache

    search = functools.partial(greedy_search, step, (), max_len=3, eos_id=1)
    jax.eval_shape(lambda first, limit: search(first, limit=limit), *np.full((2, 2), 3))
    assert seen and all(parent is None for parent in seen)


def test_the_loop_ends_as_early_as_the_rule_allows():
    """Bug: results are right, yet every sentence runs to its limit (F78: many times slower)."""
    V, W, n, L = 5, 3, 2, 20
    steps = []

    def step(token, parent, cache):
        jax.debug.callback(lambda: steps.append(1))
        return markov_step(token, parent, cache)

    @functools.partial(jax.jit, static_argnames="alpha")
    def compiled(tables, alpha):
        return beam_search(
            step,
            (tables, 0),
            jnp.full((1,), FIRST),
            beam_size=W,
            max_len=L,
            limit=jnp.full((1,), L),
            length_penalty=alpha,
            eos_id=1,
            num_hypotheses=n,
        )

    for alpha in (0.6, -0.5):
        counts = set()
        for seed in range(10):
            tables = np.random.default_rng(seed).normal(0, 1.5, (1, 1, V, V)).astype(np.float32)
            jax.block_until_ready(compiled(tables, alpha))
            jax.effects_barrier()
            _, want = reference_beam(markov_log_probs(tables[0]), W, L, alpha, 1, n, True)
            assert len(steps) == want
            counts.add(want)
            steps.clear()
        assert min(counts) < L and len(counts) > 2


def test_a_second_call_compiles_nothing():
    """Bug (F78, F117): shapes or static values that change with the data."""
    compiled, traces = [], []

    def step(token, parent, cache):
        traces.append(1)
        return markov_step(token, parent, cache)

    rng = np.random.default_rng(0)
    for limits in ([1, 6], [6, 2], [3, 3]):
        run(rng.normal(size=(2, 1, 5, 5)), limits, 2, step=step)
        compiled.append(len(traces))
    assert compiled[0] > 0
    assert compiled == [compiled[0]] * 3
