"""The shipped tasks, a file each: callables that give (training tasks, held-out tasks)."""
