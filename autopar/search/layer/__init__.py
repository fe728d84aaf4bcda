"""The search inside a layer: options of ops, layouts and meshes."""
