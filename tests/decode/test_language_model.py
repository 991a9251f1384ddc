"""Decoder-only models: prompts of any length in, continuations out, scores of whole texts."""

import dataclasses

import jax
import numpy as np
import pytest

from transformer_jax import LanguageModel
from transformer_jax.config import Config, ConfigError, ModelConfig, TokenizerConfig
from transformer_jax.data.tokenizer import EOS, PAD, START, UNK, Tokenizer

WORDS = "the cat sat on a mat and the dog ran to a red house by the sea".split()
LINES = [" ".join(WORDS[i : i + 1 + i % 5]) for i in range(len(WORDS))] * 3
PROMPTS = ["the cat", "", "a red house by the sea and the dog", "mat"]


@pytest.fixture(scope="module")
def language_model(quick_compilation) -> LanguageModel:
    tokenizer = Tokenizer.train([(line,) for line in LINES], TokenizerConfig(vocab_size=285))
    config = ModelConfig(
        vocab_size=tokenizer.vocab_size,
        d_model=32,
        d_ff=64,
        num_heads=4,
        encoder_layers=0,
        decoder_layers=2,
        positions="rotary",
        norm_position="pre",
    )
    from transformer_jax.model import Model

    rng = np.random.default_rng(0)
    shapes = Model(config).abstract_params()
    params = jax.tree.map(lambda x: 0.3 * rng.normal(size=x.shape).astype(np.float32), shapes)
    return LanguageModel(params, Config(model=config), tokenizer)


def next_log_probs(model: LanguageModel, ids: list[int]) -> np.ndarray:
    """Log-probabilities of the token after ids, by one pass over a padded row."""
    row = np.zeros((1, 64), np.int32)
    row[0, : len(ids)] = ids
    logits = jax.jit(model.model.apply)(model.params, None, row)  # causal: padding is not seen
    return np.array(jax.nn.log_softmax(logits[0, len(ids) - 1]))


def test_generation_is_the_likeliest_token_of_full_passes(language_model):
    """Bug: the prompt's last token is fed twice, padding of the prompt is seen, or positions of
    the new tokens are counted from the padded width."""
    got = language_model.generate(PROMPTS, max_tokens=5)
    for prompt, continuation in zip(PROMPTS, got, strict=True):
        ids = [START, *language_model.tokenizer.encode_target([prompt])[0][:-1]]
        new: list[int] = []
        while len(new) < 5 and EOS not in new:
            log_probs = next_log_probs(language_model, ids + new)
            log_probs[[PAD, UNK, START]] = -np.inf
            new.append(int(log_probs.argmax()))
        assert continuation == language_model.tokenizer.decode([i for i in new if i != EOS])


def test_a_prompt_is_continued_alike_alone_and_in_company(language_model):
    """Bug: draws or lengths leak from one prompt to another."""
    options = {"max_tokens": 6, "temperature": 1.0}
    together = language_model.generate(PROMPTS, seed=5, **options)
    alone = [
        language_model.generate([prompt], seed=5 + i, **options)[0]
        for i, prompt in enumerate(PROMPTS)
    ]
    assert together == alone
    assert together == language_model.generate(PROMPTS, seed=5, **options)
    assert together != language_model.generate(PROMPTS, seed=6, **options)


def test_scores_are_sums_of_log_probs_with_the_end(language_model):
    """Bug: the first or the last token is left out."""
    texts = ["the cat sat", "sea"]
    for text, score in zip(texts, language_model.score(texts), strict=True):
        ids = [START, *language_model.tokenizer.encode_target([text])[0]]
        want = [next_log_probs(language_model, ids[:i])[ids[i]] for i in range(1, len(ids))]
        np.testing.assert_allclose(score.token_log_probs, want, atol=1e-4)
        assert score.log_prob == pytest.approx(sum(want), abs=1e-4)
        assert score.num_tokens == len(ids) - 1


def test_a_draw_follows_the_distribution(language_model):
    """Bug: temperature multiplies where it should divide, or the noise is not Gumbel's."""
    from transformer_jax.decode.sampling import sample

    logits = np.log(np.asarray([0.5, 0.3, 0.15, 0.05], np.float32))
    step = lambda token, parent, cache: (np.broadcast_to(logits, (token.shape[0], 1, 4)), cache)
    N = 20_000
    found = sample(
        step,
        np.zeros(()),
        np.zeros(N, np.int32),
        max_len=1,
        limit=np.ones(N, np.int32),
        eos_id=9,
        seed=np.arange(N),
        temperature=2.0,
    )
    share = np.bincount(np.asarray(found.ids)[:, 0, 0], minlength=4) / N
    want = np.exp(logits / 2) / np.exp(logits / 2).sum()
    np.testing.assert_allclose(share, want, atol=5 * np.sqrt(0.25 / N))
    drawn = np.asarray(found.ids)[:, 0, 0]
    np.testing.assert_allclose(found.log_prob[:, 0], logits[drawn], rtol=1e-5)


def test_wrong_uses_are_refused_in_one_line(language_model):
    with pytest.raises(TypeError, match="prompts"):
        language_model.generate("the cat")
    with pytest.raises(ConfigError, match="max_tokens"):
        language_model.generate(["a"], max_tokens=0)
    config = dataclasses.replace(language_model.config, model=ModelConfig(vocab_size=300))
    with pytest.raises(ConfigError, match=r"encoder-layers: got 6.*Translator"):
        LanguageModel(language_model.params, config, language_model.tokenizer)


def test_a_language_model_trains_on_plain_text(tmp_path, capsys, quick_compilation):
    """Bug: batches without a source break training, evaluation, the report or the restored run."""
    from transformer_jax.config import DataConfig, OptimizerConfig, TrainConfig
    from transformer_jax.train.loop import train

    (tmp_path / "text.txt").write_text("\n".join(LINES) + "\n", encoding="utf-8")
    config = Config(
        model=dataclasses.replace(
            language_model_config(), vocab_size=0, d_model=32, decoder_layers=1
        ),
        tokenizer=TokenizerConfig(vocab_size=285),
        data=DataConfig(
            train_target=(str(tmp_path / "text.txt"),),
            valid_target=(str(tmp_path / "text.txt"),),
            max_source_tokens=32,
            max_target_tokens=32,
            global_batch_tokens=512,
            num_buckets=1,
        ),
        optimizer=OptimizerConfig(schedule="constant", learning_rate=1e-2, warmup_steps=5),
        train=TrainConfig(steps=60, label_smoothing=0.0, eval_every_steps=30),
    )
    assert train(config, tmp_path / "run") == 0
    out = capsys.readouterr().out
    assert "valid: perplexity" in out and "generate --checkpoint" in out
    restored = LanguageModel.from_checkpoint(tmp_path / "run")
    text = LINES[4]
    start, rest = text.split()[0], " ".join(text.split()[1:])
    assert restored.score([text])[0].log_prob > restored.score([rest + " " + start])[0].log_prob


def language_model_config() -> ModelConfig:
    return ModelConfig(d_model=32, d_ff=64, num_heads=4, encoder_layers=0, norm_position="pre")
