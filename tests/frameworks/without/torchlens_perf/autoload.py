"""The function that torch calls at import if the package is installed."""


def autoload() -> None:
    """Do nothing, unlike the package's function."""
