"""The built-in corpus: English-German pairs from a hand-written bilingual grammar.

Numbers, dates, clock times, prices and short scenes with gender, case, adjective
agreement, verb-second order and separable verbs. One English sentence has exactly one
German translation, so a translation is right or wrong by rule. Read `numbers`, `words`,
`clauses`, then `corpus`.
"""
