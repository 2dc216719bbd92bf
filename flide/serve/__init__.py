"""The server: System One and Decisions over HTTP, in front of one engine."""
