"""End in the way that the first argument names."""
import atexit
import os
import resource
import signal
import sys

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
atexit.register(print, "registered first")
atexit.register(print, "registered last")


class Odd:
    def __str__(self):
        return "an object"


print("about to end by", sys.argv[1], flush=True)
how = sys.argv[1]
if how == "none":
    sys.exit()
elif how.isdigit():
    sys.exit(int(how))
elif how == "negative":
    sys.exit(-1)
elif how == "text":
    sys.exit("a message")
elif how == "object":
    raise SystemExit(Odd())
elif how == "tuple":
    raise SystemExit((1, 2))
elif how == "true":
    raise SystemExit(True)
elif how == "subclass":
    raise type("Stop", (SystemExit,), {})(7)
elif how == "keyboard":
    raise KeyboardInterrupt
elif how == "generator":
    raise GeneratorExit("out")
elif how == "base":
    raise BaseException("base")
elif how == "broken pipe":
    raise BrokenPipeError(32, "nobody reads")
elif how == "_exit":
    os._exit(5)
elif how == "abort":
    os.abort()
elif how in ("SIGINT", "SIGTERM", "SIGKILL", "SIGHUP", "SIGSEGV", "SIGUSR1"):
    os.kill(os.getpid(), getattr(signal, how))
elif how == "at exit":
    atexit.register(lambda: 1 / 0)
elif how == "exit at exit":
    atexit.register(sys.exit, 9)
