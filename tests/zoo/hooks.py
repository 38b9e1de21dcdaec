"""Install hooks for exceptions in the main thread, in other threads and in destructors."""
import sys
import threading
import traceback


def show(kind, error, trace):
    print("excepthook", kind.__name__, error, len(traceback.extract_tb(trace)), traceback.extract_stack())


sys.excepthook = show
threading.excepthook = lambda args: print("threading.excepthook", args.exc_value, args.thread.name)
sys.unraisablehook = lambda args: print("unraisablehook", args.exc_value)


class Falls:
    def __del__(self):
        raise ValueError("in __del__")


Falls()
thread = threading.Thread(target=lambda: 1 / 0, name="worker")
thread.start()
thread.join()
raise LookupError("at the end")
