"""Text in, Batch out. Nothing here imports jax.

tokenizer.py: text and ids. sources.py: sentence pairs from files, TFDS or installed catalogues
(embedded.py, catalogues.py, cldr.py). batching.py: which pairs stand in which batch.
pipeline.py: the stream of batches a run trains on.
"""
