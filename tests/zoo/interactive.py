"""What is looked at afterwards, from the keyboard."""
value = 41
