"""The quantised decoder for CPUs: a small C library and what calls it. Built at install, where there is a compiler."""
