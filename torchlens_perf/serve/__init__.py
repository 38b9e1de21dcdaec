"""The web server, which shows the runs in a folder as live pages. It only reads the folder."""
