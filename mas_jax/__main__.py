"""`python -m mas_jax` is `mas-jax`."""

from mas_jax.cli import main

if __name__ == "__main__":
    main()
