"""torch calls this when it is imported, where the package is installed."""


def autoload() -> None:
    """Does nothing."""
