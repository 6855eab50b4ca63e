"""The checker of annotations in tests: an int is a float, as PEP 484 has it."""

from beartype import BeartypeConf, beartype

check = beartype(conf=BeartypeConf(is_pep484_tower=True))
