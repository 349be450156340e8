"""Where bytes are kept under names: a local folder, or a bucket of an S3 store.

A name is a relative path such as ``step-00000025/manifest.json``. A blob is written whole or not at all: whoever reads
it sees the bytes of one ``put``, never a part, whatever dies in between.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from holdfast.errors import ConfigError, CorruptBlob, MissingBlob, StorageError, installing
from holdfast.urls import refuse_mistyped

__all__ = [
    "ANY_SIZE",
    "RESERVED_BYTES",
    "BlobStore",
    "LocalStore",
    "ObjectStore",
    "check_space",
    "open_store",
    "synchronise",
]

RESERVED_BYTES = 16 << 20
"""What a local store leaves free on its disk, so that logs and decisions can still be written there."""

ANY_SIZE = range(1 << 62)

_PART = re.compile(r"[\w.-]+", re.ASCII)
_SCHEME = re.compile(r"(?P<scheme>[A-Za-z][A-Za-z0-9+.-]*)://(?P<rest>.*)", re.DOTALL)
_S3 = {"connect_timeout": 10, "read_timeout": 60, "retries": {"max_attempts": 1}}  # s3fs tries five times itself


class BlobStore(Protocol):
    """The port to whatever keeps blobs. All methods may be called from several threads and processes at once."""

    @property
    def url(self) -> str:
        """Where the store is, as :func:`open_store` takes it."""

    def put(self, name: str, data: bytes) -> None:
        """Writes a blob, replacing one of the same name.

        Raises:
            StorageError: it could not be written, for lack of space for example.

        After failure: the blob of that name, if there was one, is as it was. Safe to repeat.
        """

    def put_new(self, name: str, data: bytes) -> bool:
        """Writes a blob unless there is one of this name; returns whether it was written: of several, one is.

        Raises:
            StorageError: it could not be written, or it is not known whether it was.

        After failure: safe to repeat. A blob with the same bytes may be there then, from this very call.
        """

    def get(self, name: str, sizes: range = ANY_SIZE) -> bytes:
        """Returns a blob.

        Args:
            name: of the blob.
            sizes: how many bytes it may have; one of another size is not read.

        Raises:
            MissingBlob: there is none of this name.
            CorruptBlob: it has another size.
            StorageError: it cannot be read, or is no plain file.
        """

    def exists(self, name: str) -> bool:
        """Whether there is a blob of this name; raises StorageError if that cannot be found out."""

    def list(self) -> tuple[str, ...]:
        """Returns the names of all blobs, sorted; none if nothing was ever written.

        Temporary files that an interrupted ``put`` left are among them, so that they can be deleted like the rest. A
        folder that cannot be read stands there itself, for what is in it.

        Raises:
            StorageError: the store cannot be read.
        """

    def delete(self, name: str) -> None:
        """Deletes a blob; nothing happens if there is none. Safe to repeat.

        Raises:
            StorageError: it cannot be deleted.
        """


def open_store(url: str | Path) -> BlobStore:
    """Opens a store. Nothing is read or written yet.

    Args:
        url: a folder, as a path or as ``file://PATH``; or ``s3://BUCKET/PREFIX``, whose credentials and endpoint come
            from where AWS's own tools take them.

    Raises:
        ConfigError: the scheme is unknown or mistyped, or what it needs is not installed.
    """
    text = str(url)
    refuse_mistyped(text)
    match = _SCHEME.fullmatch(text)
    if match is None:
        return LocalStore(Path(text))
    if match["scheme"] == "file":
        return LocalStore(Path(match["rest"]))
    if match["scheme"] == "s3":
        return _open_s3(text, match["rest"].strip("/"))
    raise ConfigError(f"{text}: unknown scheme {match['scheme']}; expected a folder, file://PATH or s3://BUCKET/PREFIX")


def _open_s3(url: str, path: str) -> ObjectStore:
    if not path:
        raise ConfigError(f"{url}: names no bucket; expected s3://BUCKET/PREFIX")
    try:
        s3fs = importlib.import_module("s3fs")
        botocore = importlib.import_module("botocore.exceptions")
        aiohttp = importlib.import_module("aiohttp")
    except ImportError as error:
        raise ConfigError(f"{url}: {error.name} is not installed; {installing('s3')}") from None
    filesystem = s3fs.S3FileSystem(use_listings_cache=False, skip_instance_cache=True, config_kwargs=_S3)
    return ObjectStore(
        url, filesystem, path, errors=(OSError, botocore.BotoCoreError, botocore.ClientError, aiohttp.ClientError)
    )


def _checked(name: str) -> str:
    """A name that leads out of the store, or that is no plain name at all, is never used."""
    if any(_PART.fullmatch(part) is None or part in (".", "..") for part in name.split("/")):
        raise StorageError(f"{name!r} is no name of a blob: expected letters, digits, '.', '_' and '-' between slashes")
    return name


class LocalStore:
    """A folder. A blob is written to a temporary file, synchronised, renamed, and its folder synchronised.

    Args:
        folder: made at the first ``put``, private to the user.
        reserved_bytes: leave so much of the disk free.
    """

    def __init__(self, folder: Path, *, reserved_bytes: int = RESERVED_BYTES) -> None:
        self._folder = folder
        self._reserved_bytes = reserved_bytes

    @property
    def url(self) -> str:
        """See BlobStore.url."""
        return str(self._folder)

    def put(self, name: str, data: bytes) -> None:
        """See BlobStore.put."""
        self._write(name, data, lambda written, path: written.replace(path))

    def put_new(self, name: str, data: bytes) -> bool:
        """See BlobStore.put_new; a link is made once, in a folder that several machines share, too."""
        taken = False

        def link(written: Path, path: Path) -> None:
            nonlocal taken
            try:
                path.hardlink_to(written)
            except FileExistsError:
                taken = True

        self._write(name, data, link)
        return not taken

    def _write(self, name: str, data: bytes, place: Callable[[Path, Path], object]) -> None:
        path = self._folder / _checked(name)
        try:
            for folder in (self._folder, path.parent):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            check_space(path.parent, len(data), self._reserved_bytes)
            _write_whole(path, data, place)
        except OSError as error:
            raise StorageError(f"{path}: cannot be written: {error.strerror or error}") from error

    def get(self, name: str, sizes: range = ANY_SIZE) -> bytes:
        """See BlobStore.get."""
        path = self._folder / _checked(name)
        try:
            with _opened(self._folder, name) as descriptor:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode):
                    raise StorageError(f"{path}: cannot be read: it is no regular file")
                _check_size(str(path), found.st_size, sizes)
                with os.fdopen(descriptor, "rb", closefd=False) as file:
                    return file.read(found.st_size)
        except FileNotFoundError:
            raise MissingBlob(f"{path} does not exist") from None
        except NotADirectoryError:
            raise MissingBlob(f"{path} is in no folder of its own") from None
        except OSError as error:
            raise StorageError(f"{path}: cannot be read: {_told(error)}") from error

    def exists(self, name: str) -> bool:
        """See BlobStore.exists."""
        return _is_plain(self._folder / _checked(name))

    def list(self) -> tuple[str, ...]:
        """See BlobStore.list."""
        closed: list[OSError] = []
        walked = os.walk(self._folder, onerror=closed.append)
        found = [path for folder, _, names in walked for name in names if (path := Path(folder, name)).is_file()]
        for error in closed:
            path = Path(error.filename)
            if path == self._folder and not isinstance(error, FileNotFoundError):
                raise StorageError(f"{self._folder}: cannot be read: {error.strerror or error}") from error
            if path != self._folder:
                found.append(path)
        return tuple(sorted(path.relative_to(self._folder).as_posix() for path in found))

    def delete(self, name: str) -> None:
        """See BlobStore.delete; a folder that becomes empty goes with its last blob."""
        path = self._folder / _checked(name)
        try:
            path.unlink(missing_ok=True)
        except OSError as error:
            raise StorageError(f"{path}: cannot be deleted: {error.strerror or error}") from error
        if path.parent != self._folder:
            with contextlib.suppress(OSError):  # it is not empty
                path.parent.rmdir()


def check_space(folder: Path, size: int, reserved_bytes: int) -> None:
    """Checks that so many bytes can be written into a folder, and others are left.

    Raises:
        StorageError: the disk has no room for them.
        OSError: that cannot be found out.
    """
    free = shutil.disk_usage(folder).free
    if free < size + reserved_bytes:
        raise StorageError(
            f"{folder}: {free >> 10} KiB are free; {size >> 10} KiB are to be written, and "
            f"{reserved_bytes >> 10} KiB must stay free"
        )


@contextlib.contextmanager
def _opened(folder: Path, name: str) -> Iterator[int]:
    """What lies in a folder, open: no symbolic link below it is followed, nobody is waited for (as a pipe would)."""
    *parents, last = name.split("/")
    with contextlib.ExitStack() as stack:
        at = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        stack.callback(os.close, at)
        for parent in parents:
            at = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=at)
            stack.callback(os.close, at)
        found = os.open(last, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=at)
        stack.callback(os.close, found)
        yield found


def _is_plain(path: Path) -> bool:
    """Whether it is a regular file, and no link to one."""
    return path.is_file() and not path.is_symlink()


def _check_size(name: str, size: int, sizes: range) -> None:
    if size not in sizes:
        expected = f"{sizes.start} bytes" if len(sizes) == 1 else f"{sizes.start} to {sizes.stop - 1} bytes"
        raise CorruptBlob(name, expected, f"{size} bytes")


def _told(error: OSError) -> str:
    """What is wrong, in words."""
    return "it is a symbolic link" if error.errno == errno.ELOOP else error.strerror or str(error)


def _write_whole(path: Path, data: bytes, place: Callable[[Path, Path], object]) -> None:
    """Writes a file of its own, then has ``place`` give it the name, by renaming or linking it."""
    descriptor, temporary = tempfile.mkstemp(prefix=f"{path.name}.tmp-", dir=path.parent)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        place(Path(temporary), path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    synchronise(path.parent)
    synchronise(path.parent.parent)


def synchronise(folder: Path) -> None:
    """Writes a folder itself to the disk: only then does what was renamed or made in it survive a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ObjectStore:
    """A prefix of an object store that fsspec reaches; its ``put`` is atomic by itself.

    Args:
        url: as the user wrote it.
        filesystem: fsspec's, without a cache of listings.
        root: bucket and prefix.
        errors: what it raises when something is wrong.
    """

    def __init__(self, url: str, filesystem: Any, root: str, errors: tuple[type[Exception], ...]) -> None:
        self._url = url
        self._filesystem = filesystem
        self._root = root
        self._errors = errors

    @property
    def url(self) -> str:
        """See BlobStore.url."""
        return self._url

    def put(self, name: str, data: bytes) -> None:
        """See BlobStore.put."""
        self._call("written", "pipe_file", name, data)

    def put_new(self, name: str, data: bytes) -> bool:
        """See BlobStore.put_new: a request with ``If-None-Match: *``, of which a bucket grants one."""
        bucket, _, key = f"{self._root}/{_checked(name)}".partition("/")
        try:
            self._filesystem.call_s3("put_object", Bucket=bucket, Key=key, Body=data, IfNoneMatch="*")
        except FileExistsError:
            return False
        except self._errors as error:
            raise StorageError(f"{self._url}/{name}: cannot be written: {_explain(error)}") from error
        return True

    def get(self, name: str, sizes: range = ANY_SIZE) -> bytes:
        """See BlobStore.get."""
        try:
            if sizes != ANY_SIZE:
                _check_size(f"{self._url}/{name}", self._call("read", "info", name)["size"], sizes)
            return bytes(self._call("read", "cat_file", name))
        except FileNotFoundError:
            raise MissingBlob(f"{self._url}/{name} does not exist") from None

    def exists(self, name: str) -> bool:
        """See BlobStore.exists."""
        try:
            return bool(self._call("read", "info", name)["type"] == "file")
        except FileNotFoundError:
            return False

    def list(self) -> tuple[str, ...]:
        """See BlobStore.list."""
        try:
            found = self._filesystem.find(self._root)
        except FileNotFoundError:
            return ()
        except self._errors as error:
            raise StorageError(f"{self._url}: cannot be read: {_explain(error)}") from error
        return tuple(sorted(path.removeprefix(f"{self._root}/") for path in found))

    def delete(self, name: str) -> None:
        """See BlobStore.delete."""
        with contextlib.suppress(FileNotFoundError):
            self._call("deleted", "rm_file", name)

    def _call(self, what: str, method: str, name: str, *arguments: Any) -> Any:
        path = f"{self._root}/{_checked(name)}"
        try:
            return getattr(self._filesystem, method)(path, *arguments)
        except FileNotFoundError as error:
            if what == "written":
                raise StorageError(f"{self._url}/{name}: cannot be written: {_explain(error)}") from error
            raise
        except self._errors as error:
            raise StorageError(f"{self._url}/{name}: cannot be {what}: {_explain(error)}") from error


def _explain(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
