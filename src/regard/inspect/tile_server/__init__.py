"""The server behind `regard view`: exact tiles of recorded attention on demand, on the loopback."""
