"""Logits in, next state out: loss.py, optimizer.py, state.py, step.py, and loop.py above them."""
