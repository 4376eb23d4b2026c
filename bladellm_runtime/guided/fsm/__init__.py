"""The back end of our own for regular expressions: pattern -> automaton over bytes -> vocabulary trie -> mask rows."""
