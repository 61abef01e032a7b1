"""What an adapter says where the package that it is for is missing."""

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def extra(name: str) -> Iterator[None]:
    """Import the packages of an extra inside; a missing one says what to install.

    Args:
        name: The extra of hdet that has them.

    Raises:
        ModuleNotFoundError: If a package is missing.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"this adapter of hdet needs the package `{error.name}`. "
            f"Install it with: pip install 'hdet[{name}]'",
            name=error.name,
        ) from error
