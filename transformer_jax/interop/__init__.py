"""Models in and out: Marian, M2M100 and NLLB directories, CTranslate2, StableHLO, safetensors."""
