"""The shipped teams, a file each."""
