"""What a comparison is in either world: settings, arms, verdicts, pages. Imports core, stabilizers, contract and lag."""
