"""Text in, Batch out. Nothing here imports jax.

tokenizer.py, pieces.py: text and ids. sources.py: sentence pairs from files (files.py), TFDS
(prepared.py) or installed catalogues (embedded.py, catalogues.py, cldr.py). store.py: encoded once,
kept on disk; sampling.py: encoded anew in every epoch. filters.py, alignment.py: what is left out,
and what looks wrong. order.py: which pair comes when. batching.py, packing.py: shapes and rows.
pipeline.py: the stream of batches a run trains on, and its position.
"""
