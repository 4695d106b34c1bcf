"""Files behind URLs: object stores and web servers. `remotes.Remotes` reads them all."""
