"""What is kept of a batch that broke a run, so that it can be looked at and repeated."""

import json
from pathlib import Path

import jax
import numpy as np

from transformer_jax.data.tokenizer import Tokenizer
from transformer_jax.train.run_directory import write_whole
from transformer_jax.types import Batch


def keep_batch(run_dir: Path, step: int, batch: Batch, tokenizer: Tokenizer) -> Path:
    """Write the sentence pairs of a batch, one JSON object a line.

    Args:
        run_dir: the file is not-finite-STEP.jsonl in it, or with several processes
            not-finite-STEP-process-I.jsonl: each writes the rows that it feeds.
        step: number of the update that took the batch, counted from 1.
        batch: on the host.
        tokenizer: turns ids into text again.

    Returns:
        The file.
    """
    lines = []
    targets = np.asarray(batch.tgt_segments)
    for row in range(len(targets)):
        for segment in range(1, int(targets[row].max(initial=0)) + 1):
            pair: dict[str, object] = {"row": row}
            if batch.src_ids is not None:
                ids = np.asarray(batch.src_ids)[row][np.asarray(batch.src_segments)[row] == segment]
                pair |= {
                    "source": tokenizer.source.decode(ids[ids != tokenizer.eos_id].tolist()),
                    "source_ids": ids.tolist(),
                }
            ids = np.asarray(batch.tgt_out_ids)[row][targets[row] == segment]
            pair |= {"target": tokenizer.decode(ids), "target_ids": ids.tolist()}
            lines.append(json.dumps(pair, ensure_ascii=False) + "\n")
    several = f"-process-{jax.process_index()}" if jax.process_count() > 1 else ""
    path = run_dir / f"not-finite-{step}{several}.jsonl"
    write_whole(path, "".join(lines))
    return path
