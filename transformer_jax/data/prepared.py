"""Sentence pairs from TensorFlow Datasets, without TensorFlow: prepared once, read at random."""

import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from typing import Any, cast

from transformer_jax.config import ConfigError, DataConfig
from transformer_jax.types import Pair

_HOSTS = ("www.statmt.org", "storage.googleapis.com")
_PATIENCE_SECS = 4
_CHUNK = 1000  # records


class TfdsPairs(Sequence[Pair]):
    """A prepared split; texts are read when they are asked for.

    Args:
        records: data source of TFDS.
        langs: names of the features with source and target.
        identity: what tells this split from others.
    """

    def __init__(self, records: Any, langs: tuple[str, str], identity: str) -> None:
        self._records, self._langs, self._identity = records, langs, identity

    def __len__(self) -> int:
        return len(self._records)

    def __iter__(self) -> Iterator[Pair]:
        for start in range(0, len(self), _CHUNK):  # one by one would be slower
            chunk = range(start, min(start + _CHUNK, len(self)))
            yield from map(self._pair, self._records.__getitems__(list(chunk)))

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        return self._pair(self._records[range(len(self))[index]])

    def fingerprint(self) -> str:
        """Name, version, split, languages and size: TFDS never changes a version."""
        return f"{self._identity} {self._langs} {len(self)}"

    def _pair(self, record: Any) -> Pair:
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
    if not builder.is_prepared():
        _prepare(builder, config.tfds_name)

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
        size = builder.info.splits[split].num_bytes
        return TfdsPairs(
            records,
            (config.source_lang, config.target_lang),
            f"{builder.info.full_name} {split} {size}",
        )

    valid, test = config.tfds_valid_split, config.tfds_test_split
    return (
        part(config.tfds_train_split),
        {"valid": part(valid)} if valid else {},
        {"test": part(test)} if test else {},
    )


def _prepare(builder: Any, name: str) -> None:
    """Download a data set, or say at once that it cannot be: TFDS itself tries for minutes."""
    try:
        if not _network():
            raise ConnectionError("no network")
        builder.download_and_prepare()
    except Exception as error:  # whatever the network or the host raises
        raise ConfigError(
            f"--data.tfds-name: {name} is not prepared in {builder.data_path} and "
            f"cannot be downloaded here ({type(error).__name__}); on a machine with network run "
            'python -c "import tensorflow_datasets as t, tensorflow_datasets.translate; '
            f"t.builder('{name}', file_format='array_record').download_and_prepare()\" "
            "and copy its directory there"
        ) from error


def _network() -> bool:
    """Whether any of the hosts that data sets come from answers, through a proxy if one is set."""
    for host in _HOSTS:
        try:
            urllib.request.urlopen(f"https://{host}", timeout=_PATIENCE_SECS).close()
            return True
        except urllib.error.HTTPError:  # an answer, if not the page
            return True
        except OSError:
            continue
    return False
