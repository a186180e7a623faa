"""Kernel locks of files and folders: a process that ends, however it ends, releases them."""

import errno
import os
import time
import weakref
from pathlib import Path
from typing import ClassVar

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


_MOMENT = 0.05  # seconds


def try_lock(descriptor: int, shared: bool = False) -> bool | None:
    """Locks an open file or folder, without waiting, until its descriptor is closed.

    Args:
        descriptor: The file descriptor.
        shared: Boolean, whether the lock excludes only exclusive locks.

    Returns:
        Whether it is locked now. `False` if another open file holds the lock; `None` if the platform or the file
        system, such as some network file systems, has no locks.
    """
    if fcntl is None:
        return None
    try:
        fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


class FolderLock:
    """Prevents trainings in other processes from using a folder, for as long as the object exists.

    All users of a folder in one process share one lock. It leaves no file behind. Use `FolderLock.acquire`.
    """

    _held: ClassVar["weakref.WeakValueDictionary[tuple[int, int], FolderLock]"] = weakref.WeakValueDictionary()

    def __init__(self, descriptor: int) -> None:
        self._close = weakref.finalize(self, os.close, descriptor)

    @classmethod
    def acquire(cls, argument: str, folder: Path) -> "FolderLock | None":
        """Returns this process' lock of a folder, or `None` where folders cannot be locked.

        Args:
            argument: The name of the argument that received the folder, for the error message.
            folder: The folder, which exists.

        Raises:
            OSError: If another process holds the lock.
        """
        status = folder.stat()
        inode = status.st_dev, status.st_ino
        lock = cls._held.get(inode)
        if lock is not None:
            return lock
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except PermissionError:  # a folder without read permission, and any folder on Windows
            return None
        lock = cls(descriptor)
        is_locked = try_lock(descriptor)
        if is_locked is False:  # `is_held` of another process locks it for a moment
            time.sleep(_MOMENT)
            is_locked = try_lock(descriptor)
        if is_locked:
            cls._held[inode] = lock
            return lock
        if is_locked is None:
            return None
        message = (
            f"`{argument}` is in use by another process. Wait until its training ends, stop that process, or give this "
            "training another folder. A notebook whose training was interrupted uses the folder until its kernel stops"
        )
        raise OSError(errno.EBUSY, message, str(folder))

    @staticmethod
    def is_held(folder: Path) -> bool:
        """Whether a training uses the folder, in this process or another; `False` where folders cannot be locked."""
        try:
            descriptor = os.open(folder, os.O_RDONLY)
        except PermissionError:
            return False
        try:
            return try_lock(descriptor, shared=True) is False
        finally:
            os.close(descriptor)

    @classmethod
    def _close_all_in_child(cls) -> None:
        """Closes the copies of a forked process, which would keep the locks if it outlives this one."""
        for lock in list(cls._held.values()):
            lock._close()
        cls._held.clear()


if fcntl is not None:
    os.register_at_fork(after_in_child=FolderLock._close_all_in_child)
