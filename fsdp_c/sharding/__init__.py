"""From a user's module to sharded ones: what is wrapped, what a flat parameter holds, how one is built."""
