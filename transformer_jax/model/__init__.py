"""The Transformer of section 3 of the paper: Batch in, logits out.

masks.py: who may attend to whom. attention.py: section 3.2.1. dropout.py: section 5.4.
layers.py: the boxes of Figure 1. transformer.py: the stacks, and the pure functions on them.
"""

from transformer_jax.model.transformer import DecodeCache, Model, Transformer

__all__ = ["DecodeCache", "Model", "Transformer"]
