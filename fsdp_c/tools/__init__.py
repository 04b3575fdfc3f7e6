"""Tools that tell what there is: units and their memory, where each rank is, the surroundings."""
