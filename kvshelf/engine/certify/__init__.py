"""What users' own questions say of compressed caches: a bound from graded ones, and answers asked again."""
