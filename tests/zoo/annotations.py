"""Make an argument parser from a dataclass, like HfArgumentParser: annotations must be types."""
import argparse
import dataclasses
import typing

size: int = 3


@dataclasses.dataclass
class Arguments:
    rate: float = 0.1
    steps: int = 10
    name: typing.Optional[str] = None


def train(rate: float, *, steps: "int") -> None: ...


parser = argparse.ArgumentParser()
for field in dataclasses.fields(Arguments):
    kind = field.type if isinstance(field.type, type) else typing.get_args(field.type)[0]
    parser.add_argument(f"--{field.name}", type=kind, default=field.default)
print(Arguments(**vars(parser.parse_args())), train.__annotations__, __annotations__)
