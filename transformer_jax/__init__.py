"""transformer_jax"""
