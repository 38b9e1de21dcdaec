"""Raise an exception in the json module: the traceback has frames of the standard library."""
import json

json.loads("{", object_hook=dict, parse_float=lambda text: 1 / 0)
