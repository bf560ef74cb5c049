"""Methods of the registry as losses of other trainers, a file a trainer. Imports that trainer, and of simlab what is light."""
