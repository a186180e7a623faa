"""A lock of a folder: a process that ends, however it ends, releases it."""

import errno
from pathlib import Path

from filelock import FileLock, Timeout

_NAME = ".kmp.lock"


def lock_folder(argument: str, folder: Path) -> FileLock | None:
    """Prevents trainings in other processes from using a folder, for as long as the returned lock exists.

    All users of a folder in one process share one lock. The file `.kmp.lock` stays in the folder.

    Args:
        argument: The name of the argument that received the folder, for the error message.
        folder: The folder, which exists.

    Returns:
        The lock, which filelock releases when its last user has dropped it; `None` where files cannot be locked.

    Raises:
        OSError: If another process holds the lock.
    """
    lock = FileLock(folder.resolve() / _NAME, is_singleton=True, thread_local=False)
    try:
        if not lock.is_locked:
            lock.acquire(blocking=False)
    except Timeout as error:
        message = (
            f"`{argument}` is in use by another process. Wait until its training ends, stop that process, or give this "
            "training another folder. A notebook whose training was interrupted uses the folder until its kernel stops"
        )
        raise OSError(errno.EBUSY, message, str(folder)) from error
    except (OSError, NotImplementedError):  # such as some network file systems
        return None
    return lock
