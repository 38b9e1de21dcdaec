"""An asynchronous device for tests."""
