"""Does a trained model say the same in CTranslate2, and in transformers if its format holds it?

    make bench NAME=interop ARGS='RUN_DIR [--sentences 500] [--quantization int8]'

Exports the run, translates held-out sentences with length penalty 0 and beam 4 on both sides, with
CTranslate2's own rule of candidates and stopping, and prints one JSON object: the share of
identical translations, and the largest difference of log-probabilities among these. Nothing is
suppressed there: CTranslate2 would divide the probability of what it suppresses among the rest.
"""

import argparse
import json
import tempfile
import time
from pathlib import Path

from transformer_jax import Translator
from transformer_jax.data.embedded import embedded_splits
from transformer_jax.decode.engine import Request
from transformer_jax.decode.search import BeamSearch
from transformer_jax.decode.trained import load_trained
from transformer_jax.interop.ctranslate2 import export_ctranslate2

BEAM, LONGEST = 4, 200


def compare(run: Path, sentences: int, quantization: str | None) -> dict[str, object]:
    """Figures of one run.

    Args:
        run: a run directory.
        sentences: how many, from the held-out parts of the embedded data.
        quantization: of CTranslate2's weights.
    """
    import ctranslate2

    translator = Translator.from_checkpoint(run)
    tokenizer = translator.tokenizer
    language = translator.config.data.target_lang
    held_out = embedded_splits(language, cldr_train_pairs=1)
    parts = [*held_out.test.values(), *held_out.valid.values()]
    texts = [pair.source for row in zip(*parts, strict=False) for pair in row]
    longest = translator.config.data.max_source_tokens
    fits = [len(ids) <= longest for ids in tokenizer.encode_source(texts)]
    texts = [text for text, fit in zip(texts, fits, strict=True) if fit][:sentences]
    with tempfile.TemporaryDirectory() as directory:
        out = Path(directory) / "ctranslate2"
        export_ctranslate2(load_trained(run), out, quantization)
        theirs = ctranslate2.Translator(str(out), inter_threads=1, intra_threads=1)
        source = tokenizer.source
        pieces = [[source.piece(i) for i in ids] for ids in source.encode(texts)]
        begin = time.perf_counter()
        results = theirs.translate_batch(
            pieces,
            beam_size=BEAM,
            length_penalty=0.0,
            max_decoding_length=LONGEST,
            min_decoding_length=0,  # its default of 1 changes the probabilities of the first token
            return_scores=True,
        )
        their_secs = time.perf_counter() - begin
    wanted = [(result.hypotheses[0], result.scores[0]) for result in results]
    search = BeamSearch(BEAM, tokenizer.eos_id, num_hypotheses=1, rule="ctranslate2")
    # Below the Translator, whose limit is that of each sentence's own length.
    requests = [Request(ids, LONGEST) for ids in tokenizer.encode_source(texts)]
    decode = lambda: translator._engine.decode(search, requests, 4096)
    decode()  # compile
    begin = time.perf_counter()
    found = decode()
    our_secs = time.perf_counter() - begin
    same, difference = 0, 0.0
    for (hypothesis, score), (ours,) in zip(wanted, found, strict=True):
        if hypothesis == tokenizer.pieces(ours.ids):
            same += 1
            difference = max(difference, abs(score - ours.log_prob))
    return {
        "sentences": len(texts),
        "quantization": quantization or "float32",
        "identical": same / len(texts),
        "largest_difference_of_log_prob": difference,
        "seconds": {"ours": round(our_secs, 2), "ctranslate2": round(their_secs, 2)},
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path)
    parser.add_argument("--sentences", type=int, default=500)
    parser.add_argument("--quantization")
    options = parser.parse_args()
    print(json.dumps(compare(options.run, options.sentences, options.quantization)))
