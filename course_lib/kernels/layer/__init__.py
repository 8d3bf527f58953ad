"""One decoder layer for one new token: five kernels that wait for each other, or a single one that stays."""
