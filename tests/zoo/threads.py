"""An exception in a thread, and a thread that outlives the main one."""
import threading


def fail():
    raise ValueError("in a thread")


def outlive():
    threading.main_thread().join()
    print("after the main thread")


threading.Thread(target=outlive).start()
thread = threading.Thread(target=fail, name="loader")
thread.start()
thread.join()
