"""Start processes with a method of multiprocessing: they import __main__ again, and one fails."""
import concurrent.futures
import multiprocessing
import os
import sys


class Batch:
    def __init__(self, rows):
        self.rows = rows


def work(batch):
    main = sys.modules["__main__"]
    names = __name__, main.__name__, getattr(main, "__file__", None)
    return batch.rows * 2, names, sys.argv, sys.path, sys.flags.optimize


def fail():
    raise ValueError("in a child")


def environment():
    return {name: value for name, value in os.environ.items() if name.startswith(("PYTHON", "_TORCH"))}


if __name__ == "__main__":
    method = sys.argv[1]
    context = multiprocessing.get_context(method)
    with context.Pool(1) as pool:
        print(pool.map(work, [Batch(1), Batch(2)]), pool.apply(environment))
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=context) as executor:
        print(executor.submit(work, Batch(3)).result())
    child = context.Process(target=fail, name="child")
    child.start()
    child.join()
    print(child.exitcode)
