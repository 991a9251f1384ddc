"""Logits in, text out: search.py (pure), engine.py (model and batches), translator.py (strings)."""
