"""What every stabilizer and a user's advantage promise, the batches they are checked on, and the card a stabilizer gets. Imports core and stabilizers."""
