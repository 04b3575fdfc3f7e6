"""From a user's module to sharded ones: which modules are wrapped, what a flat parameter holds, how one is
built."""
