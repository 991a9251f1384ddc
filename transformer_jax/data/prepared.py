"""Sentence pairs from TensorFlow Datasets, without TensorFlow: prepared once, read at random."""

from collections.abc import Sequence
from typing import Any, cast

from transformer_jax.config import ConfigError, DataConfig
from transformer_jax.types import Pair


class TfdsPairs(Sequence[Pair]):
    """Random access to a prepared TFDS split; texts are read when asked for."""

    def __init__(self, records: Any, source_lang: str, target_lang: str) -> None:
        self._records, self._langs = records, (source_lang, target_lang)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        record = self._records[range(len(self))[index]]  # IndexError past the end: iteration stops
        texts = (record[lang] for lang in self._langs)
        return Pair(*(t.decode("utf-8") if isinstance(t, bytes) else str(t) for t in texts))


def tfds_splits(config: DataConfig) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Training pairs, and validation and test pairs by name.

    Raises:
        ConfigError: an unknown data set, language or split, or one that cannot be had here.
    """
    # Slow to import, and needed by this source alone. The second line registers WMT and the like.
    import tensorflow_datasets as tfds
    import tensorflow_datasets.translate

    try:
        builder = tfds.builder(
            config.tfds_name, data_dir=config.tfds_dir or None, file_format="array_record"
        )
    except (tfds.core.DatasetNotFoundError, ValueError) as error:
        first = str(error).strip().splitlines()[0]
        raise ConfigError(f"--data.tfds-name: got {config.tfds_name!r}: {first}") from None
    features = sorted(cast(dict, builder.info.features))
    missing = {config.source_lang, config.target_lang} - set(features)
    if missing:
        raise ConfigError(
            f"--data.source-lang, --data.target-lang: got {sorted(missing)}, allowed: two of the "
            f"features of {config.tfds_name}: {features}"
        )
    try:
        builder.download_and_prepare()
    except Exception as error:  # whatever the network or the host raises
        raise ConfigError(
            f"--data.tfds-name: {config.tfds_name} is not prepared in {builder.data_path} and "
            f"cannot be downloaded here ({type(error).__name__}); on a machine with network run "
            f"python -c \"import tensorflow_datasets as t; t.builder('{config.tfds_name}', "
            "file_format='array_record').download_and_prepare()\" and copy its directory"
        ) from error

    def part(split: str) -> TfdsPairs:
        if split.split("[")[0] not in builder.info.splits:
            raise ConfigError(
                f"--data.tfds-*-split: got {split!r}, allowed: {sorted(builder.info.splits)}"
            )
        try:
            records = cast(Any, builder).as_data_source(split=split)
        except (ValueError, NotImplementedError) as error:
            first = str(error).strip().splitlines()[0]
            raise ConfigError(f"--data.tfds-*-split: got {split!r}: {first}") from None
        return TfdsPairs(records, config.source_lang, config.target_lang)

    valid, test = config.tfds_valid_split, config.tfds_test_split
    return (
        part(config.tfds_train_split),
        {"valid": part(valid)} if valid else {},
        {"test": part(test)} if test else {},
    )
