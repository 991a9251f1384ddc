"""Sentence pairs: from parallel text files, TFDS, or installed catalogues."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

from transformer_jax.config import ConfigError, DataConfig, flag
from transformer_jax.types import Pair


class Splits(NamedTuple):
    """What a run reads. Held-out parts have names; a run without any has empty dicts."""

    train: Sequence[Pair]
    valid: Mapping[str, Sequence[Pair]]
    test: Mapping[str, Sequence[Pair]]


def load_splits(config: DataConfig, with_source: bool = True) -> Splits:
    """The three splits of the configured source.

    Args:
        config: which source, and its files or names.
        with_source: False: text for a language model, which files of the target side hold.

    Raises:
        ConfigError: a file is missing, or two sides do not belong together.
    """
    if config.source == "embedded":
        from transformer_jax.data.embedded import embedded_splits

        try:
            return Splits(
                *embedded_splits(config.target_lang, cldr_train_pairs=config.cldr_train_pairs)
            )
        except ValueError as error:
            raise ConfigError(f"--data.target-lang: {error}") from None
    if config.source == "tfds":
        return _tfds_splits(config)
    train = _text_part(config, "train", with_source)
    if not train:
        side = "train_source" if with_source else "train_target"
        files = getattr(config, side)
        got = f"no lines in {', '.join(files)}" if files else "no files"
        raise ConfigError(f"{flag(f'data.{side}')}: got {got}, allowed: one or more text files")
    valid, test = (_text_part(config, part, with_source) for part in ("valid", "test"))
    return Splits(train, {"valid": valid} if valid else {}, {"test": test} if test else {})


def read_lines(path: str | Path | int) -> Iterator[str]:
    r"""Lines of a UTF-8 file or file descriptor, split on "\n" only.

    A byte order mark at the start and "\r\n" are understood.

    Raises:
        ConfigError: names file and line of bytes that are not UTF-8, or the missing file.
    """
    name = "standard input" if isinstance(path, int) else path
    try:
        with open(path, "rb") as file:
            for number, raw in enumerate(file, 1):
                try:
                    line = raw.decode("utf-8-sig" if number == 1 else "utf-8")
                except UnicodeDecodeError as error:
                    byte = raw[error.start]
                    raise ConfigError(
                        f"{name}:{number}: got byte 0x{byte:02X}, allowed: UTF-8"
                    ) from None
                yield line.removesuffix("\n").removesuffix("\r")
    except OSError as error:
        raise ConfigError(f"{name}: cannot be read: {error.strerror}") from None


def read_parallel(source: str | Path, target: str | Path) -> list[Pair]:
    """Pairs of two files, line by line.

    Raises:
        ConfigError: the files have different numbers of lines.
    """
    source_lines, target_lines = list(read_lines(source)), list(read_lines(target))
    if len(source_lines) != len(target_lines):
        raise ConfigError(
            f"{source} has {len(source_lines)} lines and {target} has {len(target_lines)}; "
            "line i of one must translate line i of the other"
        )
    return [Pair(*pair) for pair in zip(source_lines, target_lines, strict=True)]


def _text_part(config: DataConfig, part: str, with_source: bool) -> list[Pair]:
    sources: tuple[str, ...] = getattr(config, f"{part}_source")
    targets: tuple[str, ...] = getattr(config, f"{part}_target")
    if not with_source and not sources:
        return [Pair("", line) for path in targets for line in read_lines(path)]
    if len(sources) != len(targets):
        raise ConfigError(
            f"{flag(f'data.{part}_target')}: got {len(targets)} files, allowed: {len(sources)}, "
            f"one for each of {flag(f'data.{part}_source')}"
        )
    return [
        pair
        for source, target in zip(sources, targets, strict=True)
        for pair in read_parallel(source, target)
    ]


class _TfdsPairs(Sequence[Pair]):
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


def _tfds_splits(config: DataConfig) -> Splits:
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

    def part(split: str) -> _TfdsPairs:
        if split.split("[")[0] not in builder.info.splits:
            raise ConfigError(
                f"--data.tfds-*-split: got {split!r}, allowed: {sorted(builder.info.splits)}"
            )
        try:
            records = cast(Any, builder).as_data_source(split=split)
        except (ValueError, NotImplementedError) as error:
            first = str(error).strip().splitlines()[0]
            raise ConfigError(f"--data.tfds-*-split: got {split!r}: {first}") from None
        return _TfdsPairs(records, config.source_lang, config.target_lang)

    valid, test = config.tfds_valid_split, config.tfds_test_split
    return Splits(
        part(config.tfds_train_split),
        {"valid": part(valid)} if valid else {},
        {"test": part(test)} if test else {},
    )
