"""An exception with a cause, a context and a note, raised some frames deep."""


def load(path):
    try:
        return {}["rate"]
    except KeyError as error:
        raise ValueError(f"no rate in {path}") from error


def main():
    try:
        load("config.yaml")
    except ValueError:
        error = RuntimeError("cannot train")
        if hasattr(error, "add_note"):
            error.add_note("a note")
        raise error


main()
