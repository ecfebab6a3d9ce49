"""Training of gates: small networks beside a frozen model, whose own weights no step changes."""
